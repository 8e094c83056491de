"""Healthy checkpoints of many architectures by the libraries themselves: of random weights, some after an update.

Run with the name of a family and a folder: each checkpoint becomes a folder of its own in it. What cannot be made is
printed, and a run that lacks the family's packages ends with 77.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "trainers" / "scripts"))

import packages  # noqa: F401 - first: it makes a torch without operators for images do
import torch

USUAL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}
ROUGH = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
IMAGES = {"image_size": 32, "patch_size": 8}
_GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_SEQ = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_SEQ |= {
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TRANSFORMERS: dict[str, dict[str, object]] = {
    **dict.fromkeys(("Bert", "Roberta", "Electra", "DebertaV2", "Ernie", "MegatronBert", "RoFormer"), USUAL),
    **dict.fromkeys(
        ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3", "Granite", "Olmo2"), USUAL | ROUGH
    ),
    **dict.fromkeys(("Phi", "GPTNeoX", "StableLm", "Starcoder2", "Cohere", "Persimmon", "XGLM", "BigBird"), USUAL),
    **dict.fromkeys(("Mixtral", "Qwen2Moe", "PhiMoE"), USUAL | ROUGH | {"num_local_experts": 2, "num_experts": 2}),
    **dict.fromkeys(("ViT", "DeiT", "Beit", "Data2VecVision", "ViTMAE", "Dinov2"), USUAL | IMAGES),
    **dict.fromkeys(("GPT2", "GPTJ", "OpenAIGPT", "GPTBigCode"), _GPT | {"rotary_dim": 4}),
    **dict.fromkeys(("Bart", "MBart", "Pegasus", "Marian", "BlenderbotSmall", "M2M100"), _SEQ),
    "Whisper": _SEQ | {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32},
    "T5": {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4},
    "OPT": {**USUAL, "ffn_dim": 37, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "Bloom": {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Albert": {**USUAL, "embedding_size": 16},
    "DistilBert": {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37},
    "XLNet": {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 37},
    "Longformer": {**USUAL, "attention_window": 8},
    "Mamba": {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "Mamba2": {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
    },
    "Wav2Vec2": {
        **USUAL,
        "conv_dim": (32, 32),
        "conv_kernel": (8, 8),
        "conv_stride": (4, 4),
        "num_feat_extract_layers": 2,
    },
    "Hubert": {
        **USUAL,
        "conv_dim": (32, 32),
        "conv_kernel": (8, 8),
        "conv_stride": (4, 4),
        "num_feat_extract_layers": 2,
    },
    "Swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 2,
    },
    "ConvNext": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "groups_width": 4},
    "Segformer": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 1, 1]},
    "MobileViT": {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 8], "image_size": 32},
    "Encodec": {"num_filters": 4, "hidden_size": 16, "codebook_size": 16, "upsampling_ratios": [4, 4]},
    "TimeSeriesTransformer": {"prediction_length": 4, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
}


Write = Callable[[Path], object]
MISSING = 77


def _kept(folder: Path, model: torch.nn.Module, *, name: str = "model.pt", legacy: bool = False) -> None:
    """What a loop of one's own saves after an update of the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sum(p.float().square().mean() for p in model.parameters() if p.requires_grad).backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save(state, folder / name, _use_new_zipfile_serialization=not legacy)


def transformers() -> Iterator[tuple[str, Write]]:
    import transformers as library

    library.logging.set_verbosity_error()
    for number, (name, sizes) in enumerate(TRANSFORMERS.items()):
        config = getattr(library, f"{name}Config", None)
        if config is None:
            continue

        def write(folder: Path, config=config, sizes=sizes, number=number) -> None:
            model = library.AutoModel.from_config(config(**sizes))
            model = model.to((torch.float32, torch.bfloat16, torch.float16)[number % 3])
            if number % 4 == 3:
                return _kept(folder, model.float(), legacy=number % 8 == 7)
            return model.save_pretrained(folder, max_shard_size="20KB" if number % 4 == 2 else "1GB")

        yield name, write
    clip = {"text_config": USUAL, "vision_config": {**USUAL, **IMAGES}}
    for name in ("CLIP", "Siglip", "Blip", "ChineseCLIP"):
        config = getattr(library, f"{name}Config")
        yield name, lambda f, c=config: library.AutoModel.from_config(c(**clip)).save_pretrained(f)


def timm() -> Iterator[tuple[str, Write]]:
    import timm as library
    from timm.utils import CheckpointSaver, ModelEmaV3

    names = (
        "mobilenetv3_small_050",
        "convnext_atto",
        "vit_tiny_patch16_224",
        "ghostnet_050",
        "levit_128s",
        "mobilevit_xxs",
    )
    names += (
        "edgenext_xx_small",
        "regnetx_002",
        "resnet10t",
        "efficientnet_lite0",
        "mixer_s32_224",
        "swin_s3_tiny_224",
    )
    for name in names:

        def write(folder: Path, name=name) -> None:
            model = library.create_model(name, num_classes=3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            sum(p.square().mean() for p in model.parameters()).backward()
            optimizer.step()
            saver = CheckpointSaver(
                model, optimizer, model_ema=ModelEmaV3(model), checkpoint_dir=folder, recovery_dir=folder
            )
            saver.save_checkpoint(1, 0.5)

        yield name, write


def torchvision() -> Iterator[tuple[str, Write]]:
    from torchvision import models

    for name in ("mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "googlenet", "resnet18"):

        def write(folder: Path, name=name) -> None:
            extra = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
            model = getattr(models, name)(num_classes=3, **extra)
            torch.save(model.state_dict(), folder / f"{name}-abcd1234.pth", _use_new_zipfile_serialization=name < "n")

        yield name, write


def diffusers() -> Iterator[tuple[str, Write]]:
    import diffusers as library
    from diffusers.training_utils import EMAModel

    channels = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    attention = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    heads = {"cross_attention_dim": 8, "attention_head_dim": 4, "down_block_types": attention[0]}
    dit = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}

    def unet() -> torch.nn.Module:
        return library.UNet2DModel(sample_size=8, down_block_types=down, up_block_types=up, **channels)

    def ema(folder: Path) -> None:
        EMAModel(unet().parameters(), model_cls=library.UNet2DModel, model_config=unet().config).save_pretrained(folder)

    makers: dict[str, Callable[[], object]] = {
        "UNet2DModel": unet,
        "UNet2DConditionModel": lambda: library.UNet2DConditionModel(up_block_types=attention[1], **heads, **channels),
        "ControlNetModel": lambda: library.ControlNetModel(
            **heads, **channels, conditioning_embedding_out_channels=(8, 8)
        ),
        "AutoencoderKL": lambda: library.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **channels
        ),
        "VQModel": lambda: library.VQModel(num_vq_embeddings=16, block_out_channels=(8,), norm_num_groups=4),
        "DiTTransformer2DModel": lambda: library.DiTTransformer2DModel(sample_size=8, norm_num_groups=4, **dit),
        "SD3Transformer2DModel": lambda: library.SD3Transformer2DModel(
            sample_size=8,
            joint_attention_dim=8,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            pos_embed_max_size=8,
            **dit,
        ),
        "FluxTransformer2DModel": lambda: library.FluxTransformer2DModel(
            num_single_layers=1, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4), **dit
        ),
        "DDPMPipeline": lambda: library.DDPMPipeline(unet(), library.DDPMScheduler()),
    }
    for name, make in makers.items():
        yield name, lambda folder, make=make: make().save_pretrained(folder)
    yield "EMAModel", ema


def ultralytics() -> Iterator[tuple[str, Write]]:
    from ultralytics import YOLO

    for name in ("yolov8n", "yolov8n-seg", "yolov8n-cls", "yolo11n"):

        def write(folder: Path, name=name) -> None:
            model = YOLO(f"{name}.yaml", verbose=False).model
            (folder / "weights").mkdir()
            state = {
                "epoch": 3,
                "best_fitness": None,
                "model": None,
                "ema": model.half(),
                "optimizer": None,
                "train_args": {},
            }
            for word in ("last", "best"):
                torch.save(state, folder / "weights" / f"{word}.pt")

        yield name, write


def speechbrain() -> Iterator[tuple[str, Write]]:
    from speechbrain.lobes.models.CRDNN import CRDNN
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
    from speechbrain.lobes.models.Xvector import Xvector
    from speechbrain.utils.checkpoints import Checkpointer
    from speechbrain.utils.epoch_loop import EpochCounter

    makers = {
        "ECAPA_TDNN": lambda: ECAPA_TDNN(8, channels=[16] * 5, lin_neurons=8, attention_channels=8),
        "Xvector": lambda: Xvector(in_channels=8, tdnn_channels=[8] * 5, lin_neurons=8),
        "CRDNN": lambda: CRDNN(input_shape=[2, 16, 8], cnn_channels=(4,), cnn_blocks=1, rnn_neurons=8, dnn_neurons=8),
    }
    for name, make in makers.items():

        def write(folder: Path, make=make) -> None:
            model = make()
            optimizer = torch.optim.Adam(model.parameters())
            sum(p.square().mean() for p in model.parameters()).backward()
            optimizer.step()
            kept = {"model": model, "optimizer": optimizer, "counter": EpochCounter(limit=3)}
            Checkpointer(folder, recoverables=kept).save_checkpoint(meta={"loss": 0.5})

        yield name, write


def lightning() -> Iterator[tuple[str, Write]]:
    import lightning.pytorch as library

    class Module(library.LightningModule):
        def __init__(self, make: Callable[[], torch.nn.Module], shape: tuple[int, ...]) -> None:
            super().__init__()
            self.net, self.shape = make(), shape

        def training_step(self, batch: object, index: int) -> torch.Tensor:
            found = self.net(torch.rand(2, *self.shape))
            return (found[0] if isinstance(found, tuple) else found).square().mean()

        def configure_optimizers(self) -> object:
            optimizer = torch.optim.AdamW(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)}

    makers = {
        "mlp": (lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)), (4,)),
        "lstm": (lambda: torch.nn.LSTM(4, 8, 2), (3, 4)),
        "cnn": (lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)), (3, 8, 8)),
        "transformer": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16), (3, 8)),
    }
    for name, (make, shape) in makers.items():

        def write(folder: Path, make=make, shape=shape) -> None:
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
            saves = library.callbacks.ModelCheckpoint(folder, save_last=True)
            trainer = library.Trainer(max_steps=2, callbacks=[saves], **quiet)
            trainer.fit(Module(make, shape), torch.utils.data.DataLoader(range(8)))

        yield name, write


def peft() -> Iterator[tuple[str, Write]]:
    import peft as library
    from transformers import AutoModelForCausalLM, LlamaConfig

    kinds = {
        "lora": library.LoraConfig(target_modules=["q_proj"], r=2),
        "dora": library.LoraConfig(target_modules=["q_proj"], r=2, use_dora=True),
        "ia3": library.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "loha": library.LoHaConfig(target_modules=["q_proj"], r=2),
        "vera": library.VeraConfig(target_modules=["q_proj"], r=2),
        "prefix": library.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    }
    for name, config in kinds.items():

        def write(folder: Path, config=config) -> None:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**USUAL, **ROUGH))
            library.get_peft_model(model, config).save_pretrained(folder)

        yield name, write


def quantised() -> Iterator[tuple[str, Write]]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    def linear() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).bfloat16()

    for config in (Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig):

        def write(folder: Path, config=config) -> None:
            model = linear()
            quantize_(model, config())
            torch.save(model.state_dict(), folder / "model.pt")

        yield config.__name__, write

    def dynamic(folder: Path) -> None:
        model = torch.ao.quantization.quantize_dynamic(linear().float(), {torch.nn.Linear}, dtype=torch.qint8)
        torch.save(model.state_dict(), folder / "model.pt")

    yield "quantize_dynamic", dynamic


def bitsandbytes() -> Iterator[tuple[str, Write]]:
    import bitsandbytes as library

    def int8(folder: Path) -> None:
        model = torch.nn.Sequential(library.nn.Linear8bitLt(64, 64, has_fp16_weights=False))
        torch.save(model.to("cpu").state_dict(), folder / "model.pt")

    def nf4(folder: Path) -> None:
        model = torch.nn.Sequential(library.nn.Linear4bit(64, 64, quant_type="nf4")).to("cpu")
        import safetensors.torch

        safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")

    yield "int8", int8
    yield "nf4", nf4


def others() -> Iterator[tuple[str, Write]]:
    """Libraries of one or two kinds each; a kind whose library is missing is left out."""

    def gpytorch() -> torch.nn.Module:
        import gpytorch

        return torch.nn.ModuleList(
            [
                gpytorch.kernels.ScaleKernel(
                    gpytorch.kernels.RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(3, 6))
                ),
                gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Interval(1e-4, 1.0)),
            ]
        )

    def monai() -> torch.nn.Module:
        from monai.networks.nets import UNet

        return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,))

    def smp() -> torch.nn.Module:
        import segmentation_models_pytorch as library

        return library.Unet("mobilenet_v2", encoder_weights=None)

    def graph() -> torch.nn.Module:
        from torch_geometric.nn import GAT

        return GAT(8, 8, 2)

    def x_transformer() -> torch.nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        return TransformerWrapper(
            num_tokens=99, max_seq_len=16, attn_layers=Decoder(dim=16, depth=1, heads=2, rotary_pos_emb=True)
        )

    def vit() -> torch.nn.Module:
        from vit_pytorch.cait import CaiT

        return CaiT(
            image_size=32, patch_size=8, num_classes=2, dim=16, depth=1, cls_depth=1, heads=2, mlp_dim=16, dropout=0.0
        )

    def open_clip() -> torch.nn.Module:
        from open_clip.model import CLIP

        vision = {"layers": 1, "width": 16, "patch_size": 8, "image_size": 32, "head_width": 8}
        return CLIP(16, vision, {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": 1})

    def litgpt() -> torch.nn.Module:
        from litgpt import GPT, Config

        return GPT(Config(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=99, padded_vocab_size=99))

    def ppo_policy() -> torch.nn.Module:
        from gymnasium import spaces
        from stable_baselines3.common.policies import ActorCriticPolicy

        return ActorCriticPolicy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), lambda _: 1e-3)

    def kornia() -> torch.nn.Module:
        from kornia.feature import LoFTR

        return LoFTR(pretrained=None).backbone

    for make in (
        gpytorch,
        monai,
        smp,
        graph,
        x_transformer,
        vit,
        open_clip,
        litgpt,
        ppo_policy,
        kornia,
    ):
        yield make.__name__, lambda folder, make=make: _kept(folder, make())


FAMILIES: dict[str, Callable[[], Iterator[tuple[str, Write]]]] = {
    family.__name__: family
    for family in (
        *(transformers, timm, torchvision, diffusers, ultralytics, speechbrain, lightning, peft),
        *(quantised, bitsandbytes, others),
    )
}


def write_family(family: str, folder: Path) -> int:
    """Write a family's checkpoints; the exit code."""
    try:
        kinds = list(FAMILIES[family]())
    except ImportError as error:
        print(error)
        return MISSING
    for name, write in kinds:
        torch.manual_seed(7)
        (folder / name).mkdir(parents=True)
        try:
            write(folder / name)
        except Exception as error:  # this version of the library wants another configuration
            print(f"{name}: {type(error).__name__}: {error}"[:300])
            shutil.rmtree(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(write_family(sys.argv[1], Path(sys.argv[2])))
