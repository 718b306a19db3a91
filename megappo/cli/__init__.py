"""The command line: `megappo train | sft | config | inspect`.

The composition root: only here are names of the configuration turned into objects, and only here are errors turned
into messages and exit codes. Each command is one module and is imported when it is called, so that
`megappo config` needs neither torch nor ray. To add a command: a module with one entry function, and a parser in
`main.py`.
"""
