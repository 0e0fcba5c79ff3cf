"""The commands of `llama-pretrain`, and how their options are read.

`registry` names the commands; `command_line` makes options of the fields of a dataclass, `train_command_line`
adds files and the mesh. `bench` has its own folder.
"""
