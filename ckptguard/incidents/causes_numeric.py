"""Causes that lie in the arithmetic: too large for fp16, exploding gradients, an eps of zero, a batch. Pure."""

from __future__ import annotations

import math

from ckptguard.incidents.evidence_queries import Clues, growth
from ckptguard.values.incident import LikelyCause

LIKELY = 0.6
_FP16_ZERO = 2.0**-25  # what is not larger rounds to 0 in fp16


def cause(name: str, title: str, weight: float, because: list[str], advice: list[str]) -> LikelyCause:
    """A cause with its weight put in a word."""
    weight = round(min(weight, 0.99), 2)
    confidence = "likely" if weight >= LIKELY else "possible"
    return LikelyCause(
        name=name, title=title, confidence=confidence, weight=weight, because=tuple(because), advice=tuple(advice)
    )


def fp16_overflow(clues: Clues) -> LikelyCause | None:
    """A value passed 65504, the largest that fp16 can hold."""
    headroom, falls, norm = clues.headroom, clues.falls, clues.grad_norm
    near = headroom is not None and headroom > 0.5
    if clues.fp16 is False or (clues.fp16 is None and not near):
        return None
    weight, because = 0.3, []
    if clues.fp16:
        where = "weights are fp16" if clues.weights_in_fp16 else "training computes in fp16"
        because.append(f"{where}, which ends at 65504")
    if falls >= 2 or clues.report.cause == "loss_scale":
        weight += 0.4
        if falls >= 2:
            because.append(f"the loss scale fell {falls} times without rising again, to {clues.scales[-1]:g}")
    if near:
        weight += 0.3 if clues.fp16 else 0.2
        because.append(f"a weight of the last good checkpoint uses {headroom:.0%} of fp16's range")
    if any(v is not None and math.isinf(v) for v in (norm, clues.loss)):
        weight += 0.2
        because.append("infinity, not NaN, came first: something grew too large")
    missing_scaler = clues.fp16 is True and clues.training.loss_scaler == "none"
    if missing_scaler:
        weight += 0.15
        because.append("no loss scaler is known of")
    if masked_batch(clues) is not None or _weights_before_gradients(clues):
        weight -= 0.25  # finite gradients do not speak for an overflow
    bf16 = "train in bf16: the range of fp32 at the size of fp16 (torch.autocast(dtype=torch.bfloat16), bf16=True)"
    advice = {
        True: [f"{bf16}; this hardware can"],
        False: [
            "train in fp32: this hardware has no bf16",
            "if fp32 does not fit: keep normalisation, attention scores, logits and the loss in fp32",
        ],
        None: [f"{bf16}, if the hardware can", "else fp32, or fp32 for normalisation, attention scores and the loss"],
    }[clues.training.hardware_bf16]
    if missing_scaler or clues.training.loss_scaler is None:
        advice.append("with fp16, scale the loss: torch.amp.GradScaler around backward() and step()")
    advice.append("clip the gradient norm, and unscale before clipping (scaler.unscale_(optimizer))")
    return cause("fp16_overflow", "fp16 overflow", weight, because, advice)


def gradient_explosion(clues: Clues) -> LikelyCause | None:
    """The gradients grew before they were no longer finite."""
    norms, losses = growth(clues.norms), growth(clues.losses)
    because, weight = [], 0.0
    if norms is not None and norms >= 4:
        weight = 0.8 if norms >= 30 else 0.65 if norms >= 10 else 0.4
        because.append(f"the gradient norm rose to {norms:.3g} times its usual size before the onset")
    if losses is not None and losses >= 3:
        weight = max(weight + 0.1, 0.45)
        because.append(f"the loss rose to {losses:.3g} times its usual size before the onset")
    if clues.report.cause == "spike":
        weight = max(weight, LIKELY)
        because = because or ["loss or gradient norm spiked and did not come back"]
    if not because:
        return None
    advice = ["clip the gradient norm (torch.nn.utils.clip_grad_norm_(parameters, 1.0))", "lower the learning rate"]
    if clues.warming_up:
        because.append("the learning rate was still rising")
        advice[1] = "warm up more slowly, and to a lower learning rate"
    elif clues.soon:
        because.append(f"it happened within {clues.since_start} updates of the start")
        advice.append("warm the learning rate up from 0")
    return cause("gradient_explosion", "Gradient explosion", weight, because, advice)


def eps_vanishes(clues: Clues) -> LikelyCause | None:
    """Adam divides by sqrt(v) + eps; an eps that fp16 rounds to 0 makes that 0/0."""
    known = clues.training
    adam = known.optimizer is not None and "adam" in known.optimizer.lower()
    if not (adam and clues.weights_in_fp16 and known.eps is not None and known.eps <= _FP16_ZERO):
        return None
    if clues.report.cause in ("loss_scale", "skipped") and not clues.spoiled():
        return None  # no update was made that could have divided
    because = [f"{known.optimizer} divides by sqrt(v) + eps, and eps = {known.eps:g} is 0 in the fp16 of the weights"]
    weight = LIKELY if clues.soon else 0.4
    if _weights_before_gradients(clues):
        weight = 0.9
        because.append("weights or optimizer state were poisoned although loss and gradients were finite")
    advice = [
        "keep the weights in fp32 and use autocast for the arithmetic, instead of model.half()",
        "or use bf16, whose smallest numbers are those of fp32",
        "if the weights must be fp16: an eps of 1e-6 or more",
    ]
    return cause("eps_vanishes", "An eps that vanishes in fp16", weight, because, advice)


def masked_batch(clues: Clues) -> LikelyCause | None:
    """A mean over no labels at all is 0/0: the loss is NaN and nothing is harmed."""
    loss, norm = clues.loss, clues.grad_norm
    if loss is None or not math.isnan(loss) or clues.spoiled() or (norm is not None and not math.isfinite(norm)):
        return None
    if norm is None:
        weight, shown = 0.35, "the loss was NaN, and no weight was harmed"
    else:
        weight, shown = (0.9 if norm == 0 else 0.7), f"the loss was NaN while the gradient norm was {norm:g}"
    advice = [
        "leave out batches in which every label is masked (-100): truncation may have cut the answers away",
        "raise the maximum length, or truncate the prompt instead of the answer",
        "or divide the summed loss by max(1, number of labels)",
    ]
    because = [shown, "a mean over no labels is 0/0"]
    return cause("masked_batch", "A batch whose labels are all masked", weight, because, advice)


def bad_batch(clues: Clues) -> LikelyCause | None:
    """It came out of nowhere: a batch, or an operation that some inputs take out of its domain."""
    sick = any(v is not None and not math.isfinite(v) for v in (clues.loss, clues.grad_norm))
    only_buffers = clues.kinds() - {"gradient"} == {"buffer"}
    if not (sick or only_buffers) or masked_batch(clues) is not None:
        return None
    steady = growth(clues.norms)
    weight, because = 0.25, ["loss or gradients were no longer finite from one update to the next"]
    if steady is not None and steady < 4:
        weight += 0.15
        because = [f"the gradient norm was steady ({clues.norms[-1]:.3g}) up to the update before"]
    if clues.fp16 is False:
        weight += 0.15
        because.append("nothing is computed in fp16")
    if only_buffers:
        weight += 0.2
        because.append("only buffers hold it: the update was skipped, but running statistics saw the batch")
    first, last = clues.report.onset, clues.report.step
    which = "that batch" if first == last or None in (first, last) else f"the batches of updates {first} to {last}"
    advice = [
        f"look at {which}: NaN or infinity in the inputs, empty sequences, targets out of range",
        "run it under torch.autograd.set_detect_anomaly(True): it names the operation (log(0), 0/0, sqrt(0) backwards)",
    ]
    if only_buffers:
        advice.append("check inputs before the forward pass: skipping the optimizer's step does not protect buffers")
    return cause("bad_batch", "A harmful batch or an unsafe operation", weight, because, advice)


def unknown(clues: Clues) -> LikelyCause:
    """Nothing speaks for any of the others."""
    advice = [
        "tell the guard of loss and gradient norm (guard.observe(loss=, grad_norm=)): the next report then knows more",
        "find the operation: torch.autograd.set_detect_anomaly(True) from the last good checkpoint on",
        "compare the last good checkpoint with the first bad one: ckptguard bisect RUN",
    ]
    because = ["the evidence fits none of the known causes"]
    return cause("unknown", "Not known", 0.1, because, advice)


def _weights_before_gradients(clues: Clues) -> bool:
    norm, loss = clues.grad_norm, clues.loss
    known = [v for v in (norm, loss) if v is not None]
    return clues.spoiled() and bool(known) and all(math.isfinite(v) for v in known)
