"""Small configurations for models of transformers, by the names of their classes."""

from __future__ import annotations

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
