"""The model inside its wrappers, and its own names for what they rename."""

from torch import nn

# These attribute names belong to the wrappers alone.
_HIDDEN = "_checkpoint_wrapped_module"
_WRAPPER_ATTRIBUTES = ("_orig_mod", _HIDDEN, "_fsdp_wrapped_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside all wrappers: DDP, torch.compile, FSDP, activation checkpointing."""
    while (attribute := _wrapped_attribute(model)) is not None:
        # Not the wrapper's own, which may look inside for it.
        model = nn.Module.get_submodule(model, attribute)
    return model


class CanonicalNames:
    """Translates parameter and buffer names of a wrapped model to the names of the model itself.

    A part of a name is dropped only where the module at that place is a wrapper, so that a model's own
    submodule called ``module`` keeps its name.

    Args:
        model: The model, wrapped or not, with wrappers at any depth.
    """

    def __init__(self, model: nn.Module) -> None:
        self._transparent: set[str] = set()
        for name, module in model.named_modules(remove_duplicate=False):
            attribute = _wrapped_attribute(module)
            if attribute is not None:
                # Checkpoint wrappers hide themselves from state_dict(), but not from named_modules().
                outer = [part for part in name.split(".") if part and part != _HIDDEN]
                self._transparent.add(f"{name}.{attribute}" if name else attribute)
                self._transparent.add(".".join([*outer, attribute]))

    def __call__(self, name: str) -> str:
        """The canonical form of one dotted name."""
        if not self._transparent:
            return name
        kept: list[str] = []
        place = ""
        for part in name.split("."):
            place = f"{place}.{part}" if place else part
            if place not in self._transparent:
                kept.append(part)
        return ".".join(kept)


def _wrapped_attribute(module: nn.Module) -> str | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    for attribute in _WRAPPER_ATTRIBUTES:
        if attribute in module._modules:
            return attribute
    return None
