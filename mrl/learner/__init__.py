"""The learner: batches of scored groups in, new versions out.

- `ledger`    who samples which prompt, within the staleness budget; pure
- `intake`    the socket thread around the ledger
- `peers`     the bounded conversation with the exchange
- `packing`   training examples -> packed tensors, the only bridge from records to tensors
- `world`     the process group of one policy: shares, sums, broadcasts
- `step`      one optimizer step over a packed batch
- `loop`      the learner's life

Shapes: N packed sequences of L tokens, T answer tokens of all rows of a batch, R rows.
"""
