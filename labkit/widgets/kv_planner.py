"""The KV planner: choose a model, a GPU and formats; see what fits, with the arithmetic."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from labkit.kv_math import GPUS, MODEL_SHAPES, CapacityPlan, format_bytes, plan_capacity

from .palette import OKABE_ITO

KV_FORMATS = ("auto", "fp8", "int8", "int4")
_CONTEXTS = tuple(2**n for n in range(7, 18))


class KVPlanner(widgets.VBox):
    """Controls above, the plan below: bytes of weights and KV pool, requests that fit, a bound on tokens/s.

    ``plan`` is the :class:`~labkit.kv_math.CapacityPlan` that is shown, None where the choice does not fit; ``error``
    then says why.
    """

    plan: CapacityPlan | None
    error: str

    def __init__(
        self, model: str = "llama-2-13b", gpu: str = "a100-40gb", context: int = 4096, batch_size: int = 4
    ) -> None:
        """Begin with this choice. Raises ValueError for a name or context that the menus do not have."""
        menus = {"model": (model, sorted(MODEL_SHAPES)), "gpu": (gpu, list(GPUS)), "context": (context, _CONTEXTS)}
        for name, (value, options) in menus.items():
            if value not in options:
                raise ValueError(f"{name} must be one of {', '.join(map(str, options))}, got {value!r}")
        wide: dict[str, Any] = dict(style={"description_width": "90px"}, layout=widgets.Layout(width="330px"))
        self.model: Any = widgets.Dropdown(options=sorted(MODEL_SHAPES), value=model, description="model", **wide)
        self.gpu: Any = widgets.Dropdown(options=list(GPUS), value=gpu, description="GPU", **wide)
        self.num_gpus: Any = widgets.Dropdown(options=[1, 2, 4, 8], description="GPUs", **wide)
        self.kv_dtype: Any = widgets.Dropdown(options=KV_FORMATS, description="KV format", **wide)
        self.context: Any = widgets.SelectionSlider(options=_CONTEXTS, value=context, description="context", **wide)
        self.batch_size: Any = widgets.BoundedIntText(batch_size, min=1, max=100_000, description="batch", **wide)
        self.utilization: Any = widgets.FloatSlider(0.9, min=0.5, max=1.0, step=0.01, description="utilisation", **wide)
        self.result = widgets.HTML()
        controls = [self.model, self.gpu, self.num_gpus, self.kv_dtype, self.context, self.batch_size, self.utilization]
        for control in controls:
            control.observe(self._update, "value")
        row = widgets.Layout(flex_flow="row wrap", grid_gap="2px 16px")
        super().__init__([widgets.Box(controls, layout=row), self.result])
        self._update(None)

    def _update(self, _change: Any) -> None:
        try:
            self.plan, self.error = self._made(), ""
        except ValueError as error:
            self.plan, self.error = None, str(error)
            self.result.value = f'<p role="status"><b>Does not fit.</b> {escape(self.error)}</p>'
        else:
            self.result.value = self._report(self.plan)

    def _made(self) -> CapacityPlan:
        return plan_capacity(
            self.gpu.value,
            self.model.value,
            kv_dtype=self.kv_dtype.value,
            gpu_memory_utilization=self.utilization.value,
            max_model_len=self.context.value,
            num_gpus=self.num_gpus.value,
        )

    def _report(self, plan: CapacityPlan) -> str:
        batch, context, most = self.batch_size.value, self.context.value, plan.max_concurrency()
        needed = batch * plan.spec.bytes_for_request(context)
        fits = f"fits, {most:,} would" if batch <= most else f"does not fit: {most:,} is the most"
        step = plan.decode_step_seconds(batch)
        lines = [
            ("this batch", f"{batch:,} x {context:,} tokens = {format_bytes(needed)} of KV: {fits}"),
            ("its decode step", f"at least {1e3 * step:.2f} ms: at most {batch / step:,.0f} tokens/s"),
        ]
        table = "".join(
            f'<tr><th scope="row" style="text-align:left;padding-right:1em">{escape(label)}</th>'
            f'<td style="text-align:left">{escape(value)}</td></tr>'
            for label, value in [*plan.rows(), *lines]
        )
        return f'{self._bar(plan, needed)}<table role="status" style="line-height:1.5">{table}</table>'

    def _bar(self, plan: CapacityPlan, needed: int) -> str:
        """One bar as wide as the GPU's memory: weights, this batch, the rest of the pool, what is left alone."""
        total, held = plan.gpu.memory_bytes, min(needed, plan.kv_bytes)
        parts = [
            ("weights", plan.weights_bytes, OKABE_ITO[2]),
            ("this batch", held, OKABE_ITO[0] if needed <= plan.kv_bytes else OKABE_ITO[5]),
            ("free KV pool", plan.kv_bytes - held, OKABE_ITO[4]),
            ("not used", total - plan.weights_bytes - plan.kv_bytes, "#999999"),
        ]
        spans = "".join(
            f'<span title="{name}: {format_bytes(size)}" style="width:{100 * size / total:.2f}%;background:{colour};'
            'height:22px;display:inline-block"></span>'
            for name, size, colour in parts
        )
        key = " ".join(
            f'<span style="white-space:nowrap;margin-right:1em"><span style="background:{colour};display:inline-block;'
            f'width:.8em;height:.8em"></span> {name} {format_bytes(size)}</span>'
            for name, size, colour in parts
        )
        return (
            f'<div aria-hidden="true" style="display:flex;max-width:700px;margin-top:8px">{spans}</div><div>{key}</div>'
        )

    def __repr__(self) -> str:
        return f"KVPlanner({self.model.value}, {self.gpu.value}): {self.error or 'see .plan'}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """With the plan as plain HTML beside the widget, for pages that run no kernel."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        return bundle | {"text/plain": repr(self), "text/html": self.result.value}
