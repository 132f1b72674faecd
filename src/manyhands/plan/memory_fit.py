"""Memory fit: refuse a plan that does not fit into memory, and find a change that does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from manyhands.errors import PlanError
from manyhands.plan.memory_forecast import Forecast, Setting, Study, byte_unit, short


def refuse(
    forecast: Forecast,
    available: int,
    others: Iterable[tuple[str, Forecast]] = (),
    anyway: bool = False,
) -> str | None:
    """Raise where the forecast exceeds `available`, and name the first of `others` that fits.

    `anyway`: return the message instead.
    """
    if forecast.total <= available:
        return None
    unit, divisor = byte_unit(forecast.total)
    fits = next(((words, f) for words, f in others if f.total <= available), None)
    do = (
        f"set {fits[0]} (about {short(fits[1].total / divisor)} {unit})"
        if fits
        else "no single change of recompute, micro, shard, tensor, pipe or batch makes it fit: "
        "combine them, or take a smaller model"
    )
    said = f"{forecast}, but a rank has {short(available / divisor)} {unit} here"
    if anyway:
        return f"{said}; running anyway"
    raise PlanError(f"{said}; {do}, or run it with --anyway")


def changes(study: Study, setting: Setting, batch: int) -> Iterator[tuple[str, Forecast]]:
    """Plan words that need less memory, the smallest change first.

    First those that cost time, then those that move ranks from data to the model, then those that
    need more ranks, last those that train on another batch. `batch`: samples of the micro-batch
    that was tried.
    """
    layout, change = setting.layout, dataclasses.replace
    if not setting.recompute:
        yield "recompute=true", study.forecast(change(setting, recompute=True))
    micros, scale = setting.micros, setting.scale
    while batch * scale >= 2:
        micros, scale = micros * 2, scale / 2
        yield f"micro={micros}", study.forecast(change(setting, micros=micros, scale=scale))
    for from_data in (True, False):
        if from_data and layout.data % 2:
            continue
        data = layout.data // 2 if from_data else layout.data
        for axis in ("shard", "tensor", "pipe"):
            size = getattr(layout, axis) * 2
            one = change(
                setting,
                layout=change(layout, data=data, **{axis: size}),
                stages=None,
                cuts=setting.cuts,
            )
            if axis == "pipe":
                one = change(
                    one,
                    micros=max(setting.micros, 4 * size),
                    scale=setting.scale * min(1.0, setting.micros / (4 * size)),
                )
            yield (
                (f"data={data} " if from_data and layout.data > 1 else "") + f"{axis}={size}",
                study.forecast(one),
            )
    if setting.micros == 1:
        samples = batch * setting.scale
        while samples >= 2:
            samples //= 2
            yield f"batch={int(samples)}", study.forecast(change(setting, scale=samples / batch))
