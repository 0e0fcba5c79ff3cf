"""Which rank am I, on what device, and is the process group healthy?"""
