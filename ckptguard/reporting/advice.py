"""What to do about a cause, in the words of the integration that training uses. Pure."""

from __future__ import annotations

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
