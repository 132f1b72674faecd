"""Elastic averaging: how strongly replicas and their centre pull on each other.

alpha = beta / M where it is not given;     stable for 0 < alpha < 2 / (M + 1)
"""

from manyhands.merge.building_blocks.options import need

BETA = 0.9  # pull of all replicas together on the centre


def alpha_of(beta: float, alpha: float | None, size: int) -> float:
    """The pull of one replica."""
    return beta / size if alpha is None else alpha


def check_alpha(beta: float, alpha: float | None) -> None:
    """Bounds that hold whatever the number of ranks."""
    need(0 < beta < 2, f"beta={beta}", "more than 0 and less than 2 is needed; 0.9 is usual")
    if alpha is not None:
        need(
            0 < alpha < 1,
            f"alpha={alpha}",
            "more than 0 and less than 2 / (ranks + 1) is needed; 0.9 / ranks is usual",
        )
        need(
            beta == BETA,
            f"beta={beta}",
            f"has no effect beside merge.alpha={alpha}; leave one of them out",
        )


def check_stable(beta: float, alpha: float | None, size: int, when: str = "") -> None:
    """The bound of stability for `size` ranks; `when` says in which case it matters."""
    a, bound = alpha_of(beta, alpha, size), 2 / (size + 1)
    given = f"alpha={a:g}"
    if alpha is None:
        given = f"beta={beta:g}, so alpha = beta / {size} = {a:g}"
    need(
        0 < a < bound,
        given,
        f"{when}the centre is stable for 0 < alpha < 2 / ({size} + 1) = {bound:g}; "
        f"set merge.alpha={BETA / size:g}",
    )
