"""Prompts: sources, chat rendering, tokenizers, sampling order (docs/data.md).

Owns everything between a file and token ids. Must not import ray. To add a source: a function from a SourceConfig to
rows, or to a `LeftOut` for what is none, registered in `megappo.data.sources.SOURCES`; from outside:
`data.train.kind: package.module:function`. To choose and order prompts: `megappo.data.curriculum.Curriculum`.
"""
