"""Pretrain a Llama end to end, on one machine or many."""
