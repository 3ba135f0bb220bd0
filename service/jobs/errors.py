"""What can't be asked of builds, as answers."""

from __future__ import annotations

from hivlp.service.errors import ServiceError


class BuildsOff(ServiceError):
    """No place is named that corpora may come from."""

    def __init__(self) -> None:
        super().__init__(
            403,
            "builds_off",
            "nothing can be built over HTTP here: HIVLP_JOBS__ROOTS names no place that corpora "
            "may lie below",
        )


class NoSuchBuild(ServiceError):
    """No build has this id, or it is forgotten."""

    def __init__(self, build_id: str) -> None:
        super().__init__(404, "no_such_build", f"no build with id {build_id!r}", param="id")


class BuildUnderWay(ServiceError):
    """The index has another build that waits or runs."""

    def __init__(self, index: str, build_id: str, state: str) -> None:
        message = f"index {index!r} has a build that is {state} already: {build_id}"
        super().__init__(409, "build_under_way", message, param="index")


class KeyReused(ServiceError):
    """The key came before, with something else to build."""

    def __init__(self, key: str, build_id: str) -> None:
        message = f"key: {key!r} was given before, to build something else: {build_id}"
        super().__init__(409, "key_reused", message, param="key")


class TooManyBuilds(ServiceError):
    """As many builds wait as may."""

    def __init__(self, limit: int) -> None:
        message = f"{limit} builds wait or run, the most there may be; try again"
        super().__init__(429, "overloaded", message, headers={"Retry-After": "60"})
