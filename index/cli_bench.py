"""The command `hivlp bench`: today, what a cascade costs by the paper's formula."""

from __future__ import annotations

from collections.abc import Sequence

from hivlp.index.arguments import DONE, USAGE, above_zero, parse, parser_of, positive
from hivlp.index.cost_model import (
    EXAMPLES,
    PAPER_LAYER,
    Example,
    cascade_cost,
    layer_multiplications,
)


def bench(arguments: Sequence[str]) -> int:
    """`hivlp bench cost-model`: HiVLP's formula, with the paper's layers and with real ones."""
    parser = parser_of(
        "bench",
        "What a cascade costs, in multiplications, by HiVLP's formula: with the paper's layer of "
        "1,000 and with one of this width and length.",
        "hivlp bench cost-model --rows 1000000 --keeps 2000 200",
    )
    parser.add_argument("what", choices=("cost-model",), help="what to work out")
    parser.add_argument("--rows", type=positive, help="a gallery of your own, beside the paper's")
    parser.add_argument("--keeps", type=positive, nargs="+", default=[1_000, 100])
    parser.add_argument("--dims", type=positive, nargs="+", default=[128, 300, 768])
    parser.add_argument("--exits", type=positive, nargs="+", default=[4, 8, 12])
    parser.add_argument("--width", type=positive, default=768, help="width of a layer (768)")
    parser.add_argument("--tokens", type=positive, default=16, help="tokens of a query (16)")
    parser.add_argument("--layer", type=above_zero, help="multiplications of a layer")
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    if not len(given.dims) == len(given.exits) == len(given.keeps) + 1:
        print("hivlp bench: as many --exits as --dims, and one --keeps fewer")
        return USAGE
    layer = given.layer or layer_multiplications(given.width, given.tokens)
    own = [Example("yours", (given.rows, *given.keeps))] if given.rows else []
    paper_s = [e for e in EXAMPLES if len(e.scored) == len(given.dims)]
    print(f"dims {given.dims}, exits {given.exits}; traditional / cascade, and both costs")
    for title, cost in (("the paper's layer", PAPER_LAYER), ("a real layer", layer)):
        print(f"\n{title}: {cost:.4g} multiplications")
        for example in [*paper_s, *own]:
            found = cascade_cost(example.scored, given.dims, given.exits, cost)
            rows = " > ".join(f"{n:,}" for n in example.scored)
            both = f"{found.traditional:.6g} / {found.cascade:.6g}"
            print(f"  {example.name:<20} rows scored {rows:<26}{found.ratio:8.4f}  {both}")
    print("\nmeasured times are in docs/performance.md: a search is bound by memory, not by these")
    return DONE
