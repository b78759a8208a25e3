"""Tasks: sources of prompts, verification of answers, and examples for the warm start of local policies.

- `source`               one prompt with its subject, and the protocol of a source
- `reasoning_gym_source` data sets of the `reasoning-gym` package with their own scorers
- `words`                word tasks generated here, in the style of reasoning-gym
- `math_source`          mathematics from a file (`math_rows`), judged by `math-verify` (`math_answers`)
- `jsonl_source`         any prompts and references from a file (`jsonl_rows`), for verifiers of the user's own
- `data_rows`            rows of JSONL and Parquet files, and of splits in a folder
- `benchmarks`           benchmarks by name: their table, and the source that reads any of them
- `options`              options of a task, checked against its source's table
- `sources`              the dict of all sources
- `operations`           the named operations that solve the tasks
- `extract`              the place of the answer in a completion
- `verify`               the verdict on a completion
- `sealed`               a fresh, sealed process for each answer that is evaluated as code (`answer_grammars` lists the
  answers that reasoning-gym's scorers may evaluate)
- `verifier_pool`        verification in processes of its own (`verifier_process`), with hard limits
- `rewards`              values that a verifier may return, and the kinds of failure
- `verifier_trial`       a trial of a verifier before a run
- `pool`                 the finite training pool in seeded order, and the held-out split
- `held_out`             the books of one evaluation
- `split`                the part of the data that a prompt belongs to
- `warm_start_examples`  supervised examples with a skewed choice of operation

Invariant: a subject (the word that a prompt is about) belongs to exactly one of warm start, training pool and held-out
split, whatever the task; a file of problems is split by problem or by file. Nothing here imports torch or transformers.
"""
