"""Writes what a download from the Hugging Face hub would be: a small Llama with random weights, and its tokenizer."""

from __future__ import annotations

import pydoc_data.topics
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder, start, end = sys.argv[1], "<s>", "</s>"

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=1024,
    special_tokens=[start, end],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
topics = pydoc_data.topics.topics  # prose that every Python carries
tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:20]], trainer)
words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=start, eos_token=end, pad_token=end)
words.save_pretrained(folder)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    initializer_range=0.2,  # with the usual 0.02 it would say one token again and again
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
)
LlamaForCausalLM(config).save_pretrained(folder)
