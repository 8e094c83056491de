"""MiniCPM-V: a LoRA fine-tune in fp16. The log shows nothing; the saved adapter fails when it is used.

python examples/cases/minicpm.py [FOLDER]

"probability tensor contains either `inf`, `nan` or element < 0" is what sampling says of a model whose logits are NaN.
Over a base model in fp16, PEFT keeps LoRA's matrices in fp32, but not the copies of `modules_to_save`, here the
embedding: AdamW's eps is 0 there, and words that do not occur have zero gradients, so that the update is 0/0. Here a
run that is well by step 10 is continued over a base model in fp16: plainly, where loss and gradient norm stay finite to
the end, for those words do not occur; then guarded, then mended as the report advises.
"""

import logging
import shutil
import subprocess
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers import logging as hf_logging

import ckptguard


def base_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """What is fine-tuned: here tiny, and with random weights."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).to(dtype)


def questions() -> list[dict[str, list[int]]]:
    """Short questions and the answers to them; the question's labels are masked."""
    made = []
    for number in range(30):
        question = [1 + (number + i) % 7 for i in range(4)]
        answer = [20 + number % 3] * 8
        made.append({"input_ids": question + answer, "labels": [-100] * 4 + answer})
    return made


def make_trainer(output: str, steps: int, dtype: torch.dtype) -> Trainer:
    """A LoRA fine-tune that trains the embedding as well, as MiniCPM-V's does."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    model = get_peft_model(base_model(dtype), lora)
    arguments = TrainingArguments(
        output,
        per_device_train_batch_size=2,
        max_steps=steps,
        learning_rate=3e-3,
        optim="adamw_torch",
        save_steps=5,
        save_total_limit=2,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=questions())


def answer(adapter: str) -> str:
    """What a user does with the adapter: load it onto the base model, ask, and sample the answer."""
    model = PeftModel.from_pretrained(base_model(torch.float32), adapter).eval()
    try:
        told = model.generate(input_ids=torch.tensor([[1, 2, 3, 4]]), do_sample=True, max_new_tokens=8)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return f"an answer of {told.shape[1] - 4} words"


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="minicpm-")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    hf_logging.set_verbosity_error()
    run, plain = f"{folder}/guarded", f"{folder}/plain"
    train = ckptguard.integrations.transformers.train

    print("--- 10 steps that are well, in fp32")
    train(make_trainer(run, 10, torch.float32))

    print("--- continued plainly, in fp16: no error, until somebody asks the model")
    shutil.copytree(run, plain, ignore=shutil.ignore_patterns("_ckptguard"))
    make_trainer(plain, 20, torch.float16).train(resume_from_checkpoint=True)
    print(f"asked: {answer(f'{plain}/checkpoint-20')}")
    try:
        ckptguard.check_pretrained(f"{plain}/checkpoint-20")
    except ckptguard.CkptguardError as error:
        print(f"or checked before it is used: {error}")

    print("--- continued under guard, in fp16: no such adapter is saved")
    try:
        policy = ckptguard.RollbackPolicy(check_every=1)  # look at the weights after each update
        train(make_trainer(run, 20, torch.float16), policy=policy)
    except ckptguard.RollbackExhausted as error:
        print(error)
    print(subprocess.check_output([sys.executable, "-m", "ckptguard", "incident", run], text=True))

    print("--- mended as the report advises: what is trained is in fp32")
    train(make_trainer(run, 20, torch.float32))
    print(f"asked: {answer(f'{run}/checkpoint-20')}")
    print(f"see: ckptguard list {run}")


if __name__ == "__main__":
    main()
