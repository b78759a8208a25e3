"""Tasks: where prompts come from, how answers are verified, and what a local policy is warm-started on.

- `source`               one prompt with its subject, and what a source must offer
- `reasoning_gym_source` data sets of the `reasoning-gym` package with their own scorers
- `words`                word tasks generated here, in the style of reasoning-gym
- `math_source`          mathematics from a file (`math_rows`), judged by `math-verify` (`math_answers`)
- `jsonl_source`         any prompts and references from a file (`jsonl_rows`), for verifiers of the user's own
- `data_rows`            rows of JSONL and Parquet files, and of splits in a folder
- `benchmarks`           benchmarks by name: one table of them, and the source that reads any
- `options`              options of a task, checked against its source's table
- `sources`              the dict of all sources
- `operations`           the named operations that solve the tasks
- `extract`              where in a completion the answer stands
- `verify`               the verdict on a completion
- `sealed`               what runs answers that are evaluated: a fresh, closed-up process for each (`answer_grammars`
  says what reasoning-gym's scorers may evaluate)
- `verifier_pool`        verification in processes of its own (`verifier_process`), with hard limits
- `rewards`              what a verifier may give, and the kinds of failure
- `verifier_trial`       a verifier tried before a run
- `pool`                 the finite training pool in seeded order, and the held-out split
- `held_out`             the books of one evaluation
- `split`                which part of the data a prompt belongs to
- `warm_start_examples`  supervised examples with a skewed choice of operation

Invariant: a subject (the word that a prompt is about) belongs to exactly one of warm start, training pool and held-out
split, whatever the task; a file of problems is split by problem or by file. Nothing here imports torch or transformers.
"""
