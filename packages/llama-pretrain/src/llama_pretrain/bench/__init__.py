"""The command `bench`: this trainer beside others, on the same model, weights and batches.

`command` runs it: `rounds` gives each contender its turns, each in a fresh process (`turn`), which trains the
`work` by one of the `contenders` and reads the `clock`; then `agreement`, `summary`, `published` and `table`.
"""
