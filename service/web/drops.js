// Pictures dragged onto the page.

/** Show `sign` while files are dragged over the page; give the first one dropped to `take`. */
export function listenToDrops(sign, take) {
  let depth = 0;
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const show = (visible) => (sign.hidden = !visible);
  addEventListener("dragenter", (event) => carries(event) && (depth += 1) && show(true));
  addEventListener("dragleave", (event) => carries(event) && !(depth = Math.max(0, depth - 1)) && show(false));
  addEventListener("dragover", (event) => carries(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    depth = 0;
    show(false);
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  });
}
