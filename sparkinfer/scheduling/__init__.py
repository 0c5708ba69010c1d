"""Device-free bookkeeping: requests, KV blocks, state slots, prefix index, policies and the scheduler.

Nothing here imports torch (numpy it does): the whole package runs, and is tested, on any machine.

Order and fairness
    Every request has a key, `priority * aging_steps + step of arrival` (`queue`): lower runs earlier. A request of low
    priority is therefore overtaken only by those that arrive within a fixed number of steps; with `aging_steps` 0 the
    order is strict and low priorities can starve. Waiting requests are admitted strictly in that order: nobody
    overtakes one that does not fit yet. The one exception costs no memory order: while the passes are mixed or
    packed, short prompts behind a long one share a pass; the long one gets its own pass as soon as it is the oldest.

Admission
    A request is admitted with a state slot and the KV blocks of all its known tokens, less what a prefix hit brings;
    while others run, `watermark` of the pool stays free for their growth (`resources`). A request alone always fits,
    since the configuration refuses contexts beyond the pool.

Preemption
    When a decoding request needs a block and none is free or evictable, the running request with the latest key gives
    everything back and waits again, with its old key, to be recomputed from what the prefix cache still has (`roster`).
    The earliest running request is never a victim while another runs, so the system always makes progress. A victim
    with a row in flight goes when that row commits, and nobody is admitted in the step of a preemption. Sampling noise
    is keyed by seed and output index, so a resumed request gives the tokens of an undisturbed run.

Passes
    `passes` decides between decode, mixed and prefill passes; each rule is one function with its setting.

Speculation
    With a drafter, small loads verify drafts: `passes.speculation_applies` says in which steps, `speculation` for whom
    and how many. What is drafted is the runner's affair. A request whose drafts are being verified has no second row
    in flight; blocks for drafts are taken where some are free or cached, nobody is preempted for them; KV of rejected
    drafts is overwritten by the next row, and of the states saved among drafts only those behind accepted ones are
    published.

Prefix cache
    `prefix_cache`, `prefix_index`, `checkpoints`, `eviction`, `snapshots`: KV blocks and recurrent-state snapshots
    under one index of chained block hashes.

Steps in flight
    With `max_in_flight` 2 the next plan is made before the one before has committed. Rows whose input token is still
    being sampled are `pending`; a row of a request that turns out to have ended is void: its token is dropped. What a
    plan in flight uses is given back, and what it writes is published, only when it commits.
"""
