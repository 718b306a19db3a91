"""Prompts: sources, chat rendering, tokenizers, sampling order.

Owns everything between a file and token ids. Must not import ray. To add a source: a function registered in
`SOURCES` here.
"""
