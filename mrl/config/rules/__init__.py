"""Rules between keys of a configuration; every mistake is one clear line.

- `run_rules`         between tables of a run (`check_rules` begins all the others)
- `policy_rules`      within one policy
- `objective_rules`   objectives, corrections and penalties of a policy
- `reward_rules`      rewards, verifiers and judges of tasks
- `agent_rules`       agents of tasks: functions, programs, and agents from outside
- `evaluation_rules`  draws and temperatures of evaluations
- `unit_rules`        leased units, and which engines may sleep on them
"""
