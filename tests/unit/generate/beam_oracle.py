"""Beam search in plain Python for one prompt: slow, obvious, float64.

`logprobs` gives the log-probabilities ``[V]`` of the token after a list of ids.
"""


def transformers_beams(logprobs, prompt, num_beams, max_new_tokens, eos, length_penalty=1.0, early_stopping=False):
    """[(new tokens, score)] of the finished beams, best first, by transformers' rules."""
    running, finished = [(0.0, [])], []
    for length in range(1, max_new_tokens + 1):
        candidates = _extensions(logprobs, prompt, running)[: max(2, 1 + len(eos)) * num_beams]
        ends = [tokens[-1] in eos or length == max_new_tokens for _, tokens in candidates]
        running = [c for c, end in zip(candidates, ends, strict=True) if not end][:num_beams]
        for (total, tokens), end in list(zip(candidates, ends, strict=True))[:num_beams]:
            if end:
                finished.append((total / length**length_penalty, tokens))
        finished = sorted(finished, key=lambda beam: -beam[0])[:num_beams]
        full = len(finished) == num_beams
        hoped_for = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
        improvable = bool(running) and (not full or running[0][0] / hoped_for**length_penalty > finished[-1][0])
        if not improvable or (early_stopping is True and full):
            break
    return [(tokens, score) for score, tokens in finished]


def vllm_beams(logprobs, prompt, num_beams, max_new_tokens, eos, length_penalty=1.0):
    """The same by vLLM's rules."""

    def score(total, tokens):
        return total / (len(prompt) + len(tokens) - (tokens[-1] in eos)) ** length_penalty

    running, completed = [(0.0, [])], []
    for _ in range(max_new_tokens):
        candidates = []
        for beam in running:
            candidates += _extensions(logprobs, prompt, [beam])[: 2 * num_beams]
        completed += [c for c in candidates if c[1][-1] in eos]
        running = sorted((c for c in candidates if c[1][-1] not in eos), key=lambda c: -c[0])[:num_beams]
        if not running:
            break
    ranked = sorted(((score(*beam), beam[1]) for beam in completed + running), key=lambda beam: -beam[0])
    return [(tokens, value) for value, tokens in ranked[:num_beams]]


def _extensions(logprobs, prompt, beams):
    candidates = [
        (total + value, [*tokens, token])
        for total, tokens in beams
        for token, value in enumerate(logprobs(prompt + tokens).tolist())
    ]
    return sorted(candidates, key=lambda candidate: -candidate[0])
