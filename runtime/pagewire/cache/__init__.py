"""KV memory's bookkeeping: which block belongs to whom (`block_pool`), which prefix lies where (`radix_tree`). Pure."""
