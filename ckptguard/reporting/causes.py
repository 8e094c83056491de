"""From the evidence of an incident to its likely causes, in order, with what to do about each. Pure.

Each rule looks at the clues and says what it makes of them, or None. None of them is proof: from 0.6 on a cause is
called likely, below that possible. The first rules are about the arithmetic, the others about what training began from.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.reporting.onset import last_and_first, overflow_at
from ckptguard.reporting.report_words import few
from ckptguard.values.incident import IncidentReport, LikelyCause, Training, number

_LIKELY = 0.6
_FP16_ZERO = 2.0**-25  # what is not larger rounds to 0 in fp16
_SHOWN = 3
_AT_ONCE = 20  # updates
_FEW = 2  # healthy ones before: what was loaded damaged is sick at once
_FLOOR = 1.0
_HALF = ("float16", "fp16", "half")
_RECENT = 8
_SOON = 100  # updates after a start or a resume


@dataclass(frozen=True)
class CauseEvidence:
    """A report, read as a detective would. What is not known is None, which is neither yes nor no."""

    report: IncidentReport

    @property
    def training(self) -> Training:
        """How training computes, as far as it is known."""
        return self.report.details.training or Training()

    @property
    def framework(self) -> str:
        """The integration that training uses; "" where none is known."""
        noted = self.report.evidence.get("framework")
        known = self.training.framework or (noted if isinstance(noted, str) else None)
        return known or ("trainer" if self.report.source == "callback" else "")

    @property
    def was_looked_at(self) -> bool:
        """Whether the tensors were looked at when it was noticed, so that what is not named was finite."""
        return self.report.details.training is not None or bool(self.report.details.tensors)

    @property
    def weights_in_fp16(self) -> bool:
        """Whether trained parameters themselves are fp16; seen from outside, whether they are saved so."""
        if self.training.dtypes:
            return self.training.dtypes.get("float16", 0) > 0
        good = self.report.details.last_good
        return good is not None and any(m.dtype == "float16" for m in good.largest)

    @property
    def fp16(self) -> bool | None:
        """Whether something is computed in fp16."""
        known = self.training
        stated = {str(self.report.evidence.get(name)) for name in ("autocast", "dtype")}
        if self.weights_in_fp16 or (known.autocast or "") in _HALF or stated & set(_HALF) or self.scales:
            return True
        good = self.report.details.last_good
        scaled = known.loss_scaler or ("saved" if good is not None and "scaler" in good.holds else None)
        if scaled not in (None, "none"):
            return True
        return False if known.dtypes and known.autocast is not None else None

    @property
    def scales(self) -> list[float]:
        """The loss scales, oldest first."""
        return self._finite("scale")

    @property
    def falls(self) -> int:
        """How often the loss scale fell without ever rising between, up to the end."""
        count = 0
        for later, earlier in zip(reversed(self.scales), reversed(self.scales[:-1]), strict=False):
            if later > earlier:
                break
            count += later < earlier
        return count

    @property
    def loss(self) -> float | None:
        """The loss at the end: what the evidence says, else the last sample."""
        return self._last("loss")

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm at the end."""
        return self._last("grad_norm")

    @property
    def sick(self) -> bool:
        """Whether loss or gradient norm are known not to be finite at the end."""
        return any(value is not None and not math.isfinite(value) for value in (self.loss, self.grad_norm))

    @property
    def norms(self) -> list[float]:
        """The finite gradient norms before the onset, oldest first."""
        return self._finite("grad_norm", before_onset=True)

    @property
    def losses(self) -> list[float]:
        """The finite losses before the onset, oldest first."""
        return self._finite("loss", before_onset=True)

    @property
    def warming_up(self) -> bool:
        """Whether the learning rate was still rising at the onset."""
        rates = self._finite("lr", before_onset=True)
        return len(rates) >= 2 and rates[-1] > 1.001 * rates[max(0, len(rates) - 1 - _RECENT)]

    @property
    def since_start(self) -> int | None:
        """Updates from the start or the resume to the onset, at most."""
        if self.report.onset_last is None:
            return None
        resumed = self.report.details.resumed
        return max(0, self.report.onset_last - (resumed.step if resumed is not None else 0))

    @property
    def soon(self) -> bool:
        """Whether it happened within the first updates after a start or a resume."""
        return self.since_start is not None and self.since_start <= _SOON

    @property
    def headroom(self) -> float | None:
        """The largest weight of the last good checkpoint as a share of what fp16 can hold."""
        good = self.report.details.last_good
        return good.largest[0].largest / FP16_LIMIT if good is not None and good.largest else None

    def kinds(self) -> set[str]:
        """What kinds of tensors were not finite."""
        kinds = {t.kind for t in self.report.details.tensors} - {"file"}
        named = self.report.evidence.get("tensor")
        if not kinds and isinstance(named, str):
            kinds.add("optimizer" if named.startswith("optimizer.") else "weight")
        return kinds

    def spoiled(self) -> bool:
        """Whether weights or optimizer state were not finite."""
        return bool(self.kinds() & {"weight", "optimizer", "tensor"})

    def errors(self, *checks: str) -> list[tuple[str, str]]:
        """What these checks found wrong with the first bad checkpoint."""
        bad = self.report.details.first_bad
        return [(check, said) for check, said in (bad.errors if bad is not None else ()) if check in checks]

    def _last(self, name: str) -> float | None:
        given = self.report.evidence.get(name)
        if isinstance(given, int | float | str) and not isinstance(given, bool):
            return number(given)
        reported = (getattr(sample, name) for sample in reversed(self.report.details.samples))
        return next((value for value in map(number, reported) if value is not None), None)

    def _finite(self, name: str, *, before_onset: bool = False) -> list[float]:
        onset = self.report.onset if before_onset else None
        reported = (getattr(s, name) for s in self.report.details.samples if onset is None or s.step < onset)
        return [value for value in map(number, reported) if value is not None and math.isfinite(value)]


def growth(values: list[float]) -> float | None:
    """How far the largest of the last few stands above the median of those before; None for too short a history."""
    usual, recent = values[:-_RECENT], values[-_RECENT:]
    if len(usual) < _RECENT:
        return None
    middle = statistics.median(usual)
    return max(recent) / middle if middle > 0 else None


# By topic, then by integration; "" is for training that nothing of ours is inside of.
_OBSERVE = "pass loss and gradient norm to the guard, guard.observe(loss=, grad_norm=): the next report then knows more"
_ADVICE = {
    "bf16": {
        "plain": "train in bf16: torch.autocast(device, dtype=torch.bfloat16), in place of float16",
        "trainer": "train in bf16: bf16=True in TrainingArguments, in place of fp16=True",
        "lightning": 'train in bf16: Trainer(precision="bf16-mixed"), in place of "16-mixed"',
        "deepspeed": 'train in bf16: "bf16": {"enabled": true} in the DeepSpeed configuration, in place of "fp16"',
        "accelerate": 'train in bf16: Accelerator(mixed_precision="bf16"), in place of "fp16"',
        "": "train in bf16 in place of fp16: torch.bfloat16 in a loop, bf16=True with a Trainer",
    },
    "scaler": {
        "plain": "with fp16, scale the loss: torch.amp.GradScaler around backward() and step()",
        "trainer": "with fp16, let the Trainer scale the loss: fp16=True, and weights that are loaded in fp32",
        "lightning": 'with fp16, let Lightning scale the loss: Trainer(precision="16-mixed")',
        "deepspeed": 'with fp16, let DeepSpeed find the loss scale: "loss_scale": 0 below "fp16"',
        "accelerate": 'with fp16, let Accelerate scale the loss: mixed_precision="fp16", accelerator.backward(loss)',
        "": "with fp16, use a loss scaler that lowers its scale after an overflow (GradScaler)",
    },
    "clip": {
        "plain": "clip the gradient norm, after unscaling: torch.nn.utils.clip_grad_norm_(parameters, 1.0)",
        "trainer": "clip the gradient norm: max_grad_norm=1.0 in TrainingArguments",
        "lightning": "clip the gradient norm: Trainer(gradient_clip_val=1.0)",
        "deepspeed": 'clip the gradient norm: "gradient_clipping": 1.0 in the DeepSpeed configuration',
        "accelerate": "clip the gradient norm: accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        "": "clip the gradient norm, to 1.0 for a start",
    },
    "anomaly": {
        "lightning": "run it with Trainer(detect_anomaly=True): it names the operation, such as log(0) or 0/0",
        "": "run it under torch.autograd.set_detect_anomaly(True): it names the operation, such as log(0) or 0/0",
    },
    "observe": {
        "plain": _OBSERVE,
        "trainer": "log every update (logging_steps=1): the next report then knows more",
        "lightning": "use GuardCallback of ckptguard.integrations.lightning: the next report then knows more",
        "deepspeed": "make each update by guard.update(loss): the next report then knows more",
        "accelerate": _OBSERVE,
        "": "use a guard inside of training (TrainingGuard, or a GuardCallback): the next report then knows more",
    },
}


def advise(topic: str, framework: str) -> str:
    """What to do, for training of this kind: "plain", "trainer", "lightning", "deepspeed", "accelerate" or ""."""
    words = _ADVICE[topic]
    return words.get(framework, words[""])


def _cause(name: str, title: str, weight: float, because: list[str], advice: list[str]) -> LikelyCause:
    """A cause with its weight put in a word."""
    weight = round(min(weight, 0.99), 2)
    confidence = "likely" if weight >= _LIKELY else "possible"
    return LikelyCause(
        name=name, title=title, confidence=confidence, weight=weight, because=tuple(because), advice=tuple(advice)
    )


def fp16_overflow(evidence: CauseEvidence) -> LikelyCause | None:
    """A value passed 65504, the largest that fp16 can hold."""
    headroom, falls, norm = evidence.headroom, evidence.falls, evidence.grad_norm
    near = headroom is not None and headroom > 0.5
    overflowed = overflow_at(evidence.report)
    if evidence.fp16 is False or (evidence.fp16 is None and not near and overflowed is None):
        return None
    weight, because = 0.3, []
    if overflowed is not None:
        weight += 0.4
        because.append(f"the record of the incident says that gradients first overflowed at update {overflowed}")
    if evidence.fp16:
        where = "weights are fp16" if evidence.weights_in_fp16 else "training computes in fp16"
        because.append(f"{where}, which ends at 65504")
    elif overflowed is not None:
        weight -= 0.1
        because.append("the record does not say in which type: fp16 ends at 65504, and overflows first")
    if falls >= 2 or evidence.report.cause == "loss_scale":
        weight += 0.4
        if falls >= 2:
            because.append(f"the loss scale fell {falls} times without rising again, to {evidence.scales[-1]:g}")
    if near:
        weight += 0.3 if evidence.fp16 else 0.2
        because.append(f"a weight of the last good checkpoint uses {headroom:.0%} of fp16's range")
    if any(v is not None and math.isinf(v) for v in (norm, evidence.loss)):
        weight += 0.2
        what = "gradient norm" if norm is not None and math.isinf(norm) else "loss"
        because.append(f"the {what} was infinite, not NaN: something grew too large")
    known = evidence.training
    missing_scaler = evidence.fp16 is True and known.loss_scaler == "none" and known.scaler_not_given is None
    if missing_scaler:
        weight += 0.15
        because.append("training uses no loss scaler")
    if masked_batch(evidence) is not None or _weights_before_gradients(evidence):
        weight -= 0.25  # finite gradients do not speak for an overflow
    bf16 = advise("bf16", evidence.framework)
    steps = {
        True: [f"{bf16}; this hardware can"],
        False: [
            "train in fp32: this hardware has no bf16",
            "if fp32 does not fit: keep normalisation, attention scores, logits and the loss in fp32",
        ],
        None: [f"{bf16}, if the hardware can", "else fp32, or fp32 for normalisation, attention scores and the loss"],
    }[evidence.training.hardware_bf16]
    if missing_scaler or evidence.training.loss_scaler is None:
        steps.append(advise("scaler", evidence.framework))
    steps.append(advise("clip", evidence.framework))
    return _cause("fp16_overflow", "fp16 overflow", weight, because, steps)


def scaler_not_given(evidence: CauseEvidence) -> LikelyCause | None:
    """A scaler leaves out an update whose gradients are not finite, and only a guard that knows it can tell."""
    scaler = evidence.training.scaler_not_given
    if scaler is None or evidence.spoiled():
        return None
    because = [f"a {scaler} works in this process, and the guard was not given it", "weights and state are finite"]
    advice = ["TrainingGuard(..., scaler=scaler), if it scales this loss: the guard then knows what it skipped"]
    return _cause("scaler_not_given", "An update that the loss scaler skipped", 0.95, because, advice)


def gradient_explosion(evidence: CauseEvidence) -> LikelyCause | None:
    """The gradients grew before they were no longer finite."""
    norms, losses = growth(evidence.norms), growth(evidence.losses)
    because, weight = [], 0.0
    if norms is not None and norms >= 4:
        weight = 0.8 if norms >= 30 else 0.65 if norms >= 10 else 0.4
        because.append(f"the gradient norm rose to {norms:.3g} times its usual size before the onset")
    if losses is not None and losses >= 3:
        weight = max(weight + 0.1, 0.45)
        because.append(f"the loss rose to {losses:.3g} times its usual size before the onset")
    if evidence.report.cause == "spike":
        weight = max(weight, _LIKELY)
        because = because or [evidence.report.reason]
    if not because:
        return None
    steps = [advise("clip", evidence.framework), "lower the learning rate"]
    if evidence.warming_up:
        because.append("the learning rate was still rising")
        steps[1] = "warm up more slowly, and to a lower learning rate"
    elif evidence.soon:
        because.append(f"it happened {_soon(evidence)}")
        steps.append("warm the learning rate up from 0")
    return _cause("gradient_explosion", "Gradient explosion", weight, because, steps)


def eps_vanishes(evidence: CauseEvidence) -> LikelyCause | None:
    """Adam divides by sqrt(v) + eps; an eps that fp16 rounds to 0 makes that 0/0."""
    known = evidence.training
    vanishes = evidence.weights_in_fp16 and known.eps is not None and known.eps <= _FP16_ZERO
    if "adam" not in (known.optimizer or "").lower() or not vanishes:
        return None
    if evidence.report.cause in ("loss_scale", "skipped") and not evidence.spoiled():
        return None  # no update was made that could have divided
    because = [f"{known.optimizer} divides by sqrt(v) + eps, and eps = {known.eps:g} is 0 in the fp16 of the weights"]
    weight = _LIKELY if evidence.soon else 0.4
    if _weights_before_gradients(evidence):
        weight = 0.9
        because.append("weights or optimizer state were poisoned although loss and gradients were finite")
    advice = [
        "keep the weights in fp32 and use autocast for the arithmetic, instead of model.half()",
        "or use bf16, whose smallest numbers are those of fp32",
        "if the weights must be fp16: an eps of 1e-6 or more",
    ]
    return _cause("eps_vanishes", "An eps that vanishes in fp16", weight, because, advice)


def masked_batch(evidence: CauseEvidence) -> LikelyCause | None:
    """A mean over no labels at all is 0/0: the loss is NaN and nothing is harmed."""
    loss, norm = evidence.loss, evidence.grad_norm
    if loss is None or not math.isnan(loss) or evidence.spoiled() or (norm is not None and not math.isfinite(norm)):
        return None
    if norm is None and not evidence.was_looked_at:
        return None
    if norm is None:
        weight, shown = 0.35, "the loss was NaN, and no tensor was found that is not finite"
    else:
        weight, shown = (0.9 if norm == 0 else 0.7), f"the loss was NaN while the gradient norm was {norm:g}"
    advice = [
        "leave out batches in which every label is masked (-100): truncation may have cut the answers away",
        "raise the maximum length, or truncate the prompt instead of the answer",
        "or divide the summed loss by max(1, number of labels)",
    ]
    because = [shown, "a mean over no labels is 0/0"]
    return _cause("masked_batch", "A batch whose labels are all masked", weight, because, advice)


def bad_batch(evidence: CauseEvidence) -> LikelyCause | None:
    """It came out of nowhere: a batch, or an operation that some inputs take out of its domain."""
    only_buffers = evidence.kinds() - {"gradient"} == {"buffer"}
    if not (evidence.sick or only_buffers) or masked_batch(evidence) is not None:
        return None
    well, sick = last_and_first(evidence.report.details.samples)
    if not only_buffers and well is None:
        return None  # nothing shows that all was well before
    weight, because = 0.25, []
    at = sick.step if sick is not None else evidence.report.step
    if well is not None and at is not None and at - well.step > 1:
        because.append(f"the last finite record is of update {well.step}, and the next one, of {at}, is not finite")
    elif well is not None:
        because.append(f"update {well.step} was finite, and the next one was not")
    steady = growth(evidence.norms)
    if steady is not None and steady < 4:
        weight += 0.15
        because.append(f"the gradient norm was steady up to then ({evidence.norms[-1]:.3g})")
    if evidence.fp16 is False:
        weight += 0.15
        because.append("nothing is computed in fp16")
    if only_buffers:
        weight += 0.2
        because.append("only buffers hold it: the update was skipped, but running statistics saw the batch")
    first, last = evidence.report.onset, evidence.report.details.onset_through or evidence.report.step
    which = "that batch" if first == last or None in (first, last) else f"the batches of updates {first} to {last}"
    steps = [
        f"look at {which}: NaN or infinity in the inputs, empty sequences, targets out of range",
        advise("anomaly", evidence.framework),
    ]
    if only_buffers:
        steps.append("check inputs before the forward pass: skipping the optimizer's step does not protect buffers")
    return _cause("bad_batch", "A harmful batch or an unsafe operation", weight, because, steps)


def unknown(evidence: CauseEvidence) -> LikelyCause:
    """Nothing speaks for any of the others."""
    steps = [
        advise("observe", evidence.framework),
        f"go on from the last good checkpoint, and {advise('anomaly', evidence.framework)}",
        f"compare the last good checkpoint with the first bad one: ckptguard bisect {shlex.quote(evidence.report.run)}",
    ]
    return _cause("unknown", "Not known", 0.1, ["the records show none of the known causes"], steps)


def _soon(evidence: CauseEvidence) -> str:
    count, resumed = evidence.since_start, evidence.report.details.resumed
    began = f"the resume at step {resumed.step}" if resumed is not None else "the start"
    return f"within {count} update{'s' * (count != 1)} of {began}"


def _weights_before_gradients(evidence: CauseEvidence) -> bool:
    known = evidence.grad_norm is not None or evidence.loss is not None
    return evidence.spoiled() and known and not evidence.sick


def damaged_file(evidence: CauseEvidence) -> LikelyCause | None:
    """A pretrained file or a checkpoint that is not what was saved: NaN from the first updates on."""
    because, weight = [], 0.0
    broken = [": ".join(found) for found in evidence.errors("digests", "structure", "completeness", "same-save")]
    if evidence.report.cause == "damage" or broken:
        weight, because = 0.9, broken[:_SHOWN] or [evidence.report.reason]
    since, well = evidence.since_start, max(len(evidence.norms), len(evidence.losses))
    if (evidence.sick or evidence.falls >= 2) and since is not None and since <= _AT_ONCE and well <= _FEW:
        weight = max(weight, 0.4)
        because.append(f"it was sick {_soon(evidence)}: what was loaded may have been so already")
        if evidence.scales and evidence.scales[-1] <= _FLOOR and evidence.falls >= 2:
            weight = max(weight, 0.7)
            because.append(f"the loss scale fell to {evidence.scales[-1]:g}: an overflow would have ended on the way")
    if not because:
        return None
    run = shlex.quote(evidence.report.run)
    steps = [f"check the other checkpoints: ckptguard verify {run}"]
    if evidence.report.cause == "damage":
        steps.insert(0, f"put it right from a copy or a replica: ckptguard repair {run}")
        steps.append("check the disk or the mount that it lies on: what damaged one file may damage more")
        return _cause("damaged_file", "Damaged files of a checkpoint", weight, because, steps)
    steps.insert(0, "check what training loaded: ckptguard verify PATH --sums FILE; download again what differs")
    if evidence.report.details.training is not None:
        steps.append("in the script, before training: ckptguard.check_pretrained(path)")
    return _cause("damaged_file", "A damaged pretrained file or checkpoint", weight, because, steps)


def keys_do_not_match(evidence: CauseEvidence) -> LikelyCause | None:
    """Weights that were not in the file keep their random start; weights that the model does not know are lost."""
    resumed = evidence.report.details.resumed
    said = ((resumed.missing, "missing"), (resumed.unexpected, "unexpected")) if resumed is not None else ()
    because = [f"{len(names)} {what} when it was loaded: {few(names, _SHOWN)}" for names, what in said if names]
    because += [wrong for _, wrong in evidence.errors("schema")][:_SHOWN]
    if not because:
        return None
    advice = [
        "load strictly (load_state_dict(strict=True)) and look at what it says",
        "a prefix (module., _orig_mod., model.) on one side only? Strip it before loading",
        "is it the configuration of the same model: size, vocabulary, adapters?",
    ]
    weight = 0.75 if evidence.soon else 0.4
    return _cause("keys_do_not_match", "Missing or unexpected keys", weight, because, advice)


def optimizer_not_loaded(evidence: CauseEvidence) -> LikelyCause | None:
    """Moments of zero: the first updates after the resume are as large as the learning rate allows."""
    resumed = evidence.report.details.resumed
    if resumed is None or "optimizer" not in resumed.anew:
        return None
    also = [part for part in resumed.anew if part != "optimizer"]
    too = f" ({few(also, _SHOWN)} too)" if also else ""
    because = [f"the resume at step {resumed.step} started the optimizer anew{too}"]
    advice = [
        "resume from a checkpoint that holds the optimizer's state (ckptguard show CKPT says what it holds)",
        "if there is none: warm the learning rate up again",
    ]
    weight = 0.65 if evidence.soon else 0.3
    return _cause("optimizer_not_loaded", "Optimizer state not loaded", weight, because, advice)


def world_size_differs(evidence: CauseEvidence) -> LikelyCause | None:
    """Other ranks than at the save: another batch size, other random numbers, sharded state that does not fit."""
    resumed, good = evidence.report.details.resumed, evidence.report.details.last_good
    saved = resumed.world_size if resumed is not None else good.world_size if good is not None else None
    now = evidence.training.world_size
    if saved is None or now is None or saved == now:
        return None
    because = [f"the checkpoint was saved by {saved} ranks, training runs on {now}"]
    advice = [
        f"resume on {saved} ranks",
        "or keep the global batch size (gradient accumulation), and scale the learning rate with it",
        "DeepSpeed's sharded optimizer state loads on as many ranks as saved it only",
    ]
    weight = 0.55 if evidence.soon else 0.3
    return _cause("world_size_differs", "Another number of ranks than at the save", weight, because, advice)


def storage_failed(evidence: CauseEvidence) -> LikelyCause:
    """The checkpoint could not be written: nothing is wrong with training."""
    advice = ["is the disk full, or a quota used up? (df -h, df -i)", "is the run's folder writable, and mounted?"]
    return _cause("storage_failed", "The storage refused", 0.9, [evidence.report.reason], advice)


RULES: tuple[Callable[[CauseEvidence], LikelyCause | None], ...] = (
    fp16_overflow,
    scaler_not_given,
    gradient_explosion,
    eps_vanishes,
    masked_batch,
    bad_batch,
    damaged_file,
    keys_do_not_match,
    optimizer_not_loaded,
    world_size_differs,
)
_NOTHING_WRONG = ("asked", "anew", "crash")
_NOT_SAVED = ("storage", "unsaved")


def likely_causes(report: IncidentReport) -> tuple[LikelyCause, ...]:
    """What may have caused the incident, the likeliest first; empty only where nothing was wrong."""
    if report.cause in _NOTHING_WRONG:
        return ()
    evidence = CauseEvidence(report)
    rules = (storage_failed,) if report.cause in _NOT_SAVED else RULES
    found = [cause for rule in rules if (cause := rule(evidence)) is not None]
    return tuple(sorted(found, key=lambda cause: -cause.weight)) or (unknown(evidence),)
