"""Writes gguf/model.gguf: a complete Llama of one layer, width 2, one head, three tokens."""

from pathlib import Path

import gguf
import numpy as np

writer = gguf.GGUFWriter(Path(__file__).parent / "gguf" / "model.gguf", "llama")
writer.add_name("seed")
writer.add_context_length(8)
writer.add_embedding_length(2)
writer.add_block_count(1)
writer.add_feed_forward_length(2)
writer.add_head_count(1)
writer.add_head_count_kv(1)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(10000.0)
writer.add_rope_dimension_count(2)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(["a", "b", "ab"])
writer.add_token_types([1, 1, 1])
writer.add_token_merges(["a b"])
writer.add_bos_token_id(0)
writer.add_eos_token_id(1)
writer.add_add_bos_token(True)
writer.add_chat_template("{{ messages }}")
matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
writer.add_tensor("token_embd.weight", np.ones((3, 2), np.float32))
writer.add_tensor("output_norm.weight", np.ones(2, np.float32))
writer.add_tensor("rope_freqs.weight", np.ones(1, np.float32))
for name in matrices:
    writer.add_tensor(f"blk.0.{name}.weight", np.ones((2, 2), np.float32))
for name in ["attn_norm", "ffn_norm"]:
    writer.add_tensor(f"blk.0.{name}.weight", np.ones(2, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
