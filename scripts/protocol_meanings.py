"""What fields mean whose names say it to a reader of the source; the page of the protocol wants every one."""

from __future__ import annotations

MEANINGS: dict[str, dict[str, str]] = {
    "Hello": {
        "versions": "Protocol versions that the client speaks.",
    },
    "Generate": {
        "prompt": "Text; the tokenizer adds what the model wants in front.",
        "messages": "A conversation, oldest turn first; the model's chat template makes the prompt of it.",
        "template_kwargs": "Variables of the chat template.",
        "params": "How tokens are chosen, and when it ends.",
    },
    "ChatMessage": {
        "role": "`system`, `user`, `assistant`, or what else the template knows.",
        "content": "Text of the turn.",
    },
    "Cancel": {
        "stream": "An open stream of this connection.",
    },
    "Finish": {
        "stream": "An open stream of this connection.",
        "choice": "Below `n`.",
        "at": "Number of generated tokens that stay.",
    },
    "Resume": {
        "request_id": "Of `accepted`.",
        "resume_key": "Of `accepted`.",
    },
    "Pause": {
        "stream": "An open stream of this connection.",
        "paused": "False: go on.",
    },
    "Ping": {
        "nonce": "Comes back in `pong`.",
    },
    "GetFile": {
        "name": "One of `welcome.files`.",
        "offset": "Of the first byte.",
    },
    "FileInfo": {
        "name": "What `get_file` takes.",
        "size": "Bytes.",
    },
    "Limits": {
        "max_n": "Of `params.n`.",
        "max_stop_strings": "Of `params.stop`.",
        "max_stop_chars": "Of one stop string.",
        "max_stop_token_ids": "Of `params.stop_token_ids`.",
        "max_logit_bias": "Entries of `params.logit_bias`.",
        "max_top_logprobs": "Of `params.logprobs` and `params.prompt_logprobs`.",
        "max_messages": "Turns of a conversation.",
        "max_template_kwargs": "Variables of a chat template.",
        "max_file_piece": "Bytes in one `file_piece`.",
    },
    "Welcome": {
        "version": "The one that both speak from now on.",
        "role": "A gateway takes text and token ids, an engine token ids only.",
        "model": "Name of the model.",
        "vocab_size": "Token ids are below it.",
        "max_model_len": "Prompt and output together, tokens.",
        "max_streams": "Open streams of one connection.",
        "max_message_bytes": "Largest frame that the server takes.",
        "heartbeat_ms": "How often the client should ping.",
        "heartbeat_timeout_ms": "Silence after which either side takes the other for lost.",
        "eos_ids": "Tokens that end a continuation unless `ignore_eos`.",
        "limits": "Of a request.",
    },
    "Accepted": {
        "stream": "The one that was asked for.",
        "request_id": "Unique at this server; in its logs, and for `resume`.",
        "seed": "The one in use.",
        "num_prompt_tokens": "Tokens of the prompt.",
    },
    "Tokens": {
        "logprobs": "Of those entries whose request asked for them.",
    },
    "PromptLogprobs": {
        "stream": "Whose prompt.",
        "top": "Alternatives of each token.",
    },
    "Finished": {
        "stream": "Whose choice.",
        "choice": "Which of `n`.",
        "reason": "stop: a stop string, a stop token or the model's end. length: `max_tokens` or the context is full. cancelled: by the client, or since it read too slowly. error: see the `error` that follows.",
        "num_tokens": "Generated tokens that count; a stop string's own tokens are among them.",
    },
    "Usage": {
        "prompt": "Tokens of the prompt.",
        "completion": "Generated tokens of all choices.",
        "cached": "Of the prompt, taken from the prefix cache.",
    },
    "Timings": {
        "total_ns": "Until its last token was known.",
        "num_preemptions": "Times that it lost its KV memory and went on later.",
    },
    "Done": {
        "usage": "Tokens of the request.",
        "timings": "Measured by the engine.",
        "stream": "Which.",
        "seed": "The one that was in use.",
    },
    "Error": {
        "code": "See the table of codes; a client takes one that it does not know for `error`.",
        "message": "One sentence for people; 300 characters at most of what quotes the peer.",
        "stream": "That stream is over. None: no stream is.",
        "field": "What was wrong, as a dotted path: `params.stop[1]`.",
        "retry_after_ms": "When to try again. None: trying again does not help.",
    },
    "Pong": {
        "nonce": "That of the `ping`.",
        "ready": "New streams are taken, and tokens move.",
    },
    "Stats": {
        "values": "By name.",
    },
    "Load": {
        "ready": "As in `pong`.",
        "kv_blocks_used": "Blocks that running continuations hold.",
    },
    "FilePiece": {
        "name": "Of the file.",
        "offset": "Of the first byte.",
        "data": "Empty at the end of the file.",
    },
    "AdminDone": {
        "what": "`drain` or `reload`.",
        "message": "What to tell a person.",
    },
    "Replay": {
        "resume_key": "As above.",
    },
}
