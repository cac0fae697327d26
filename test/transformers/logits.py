"""logits.py DIR... : prints the logits of each checkpoint for one prompt, as a line of JSON.

"logits" are those of the checkpoint in float32. "misplaced" are those after the weights of the experts have moved by one place, and the gates
have not.
"""
import json
import sys

import torch
import transformers

PROMPT = torch.tensor([[3, 5, 8, 13, 21, 34, 55, 7, 9, 11, 15]])


def main():
    for path in sys.argv[1:]:
        config = transformers.AutoConfig.from_pretrained(path)
        # The architecture of published Phi checkpoints is not the name of a class.
        kind = getattr(transformers, config.architectures[0], transformers.AutoModelForCausalLM)
        model = kind.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(input_ids=PROMPT, use_cache=False).logits
            for name, weight in model.named_parameters():
                if ".experts." in name and weight.ndim == 3:
                    weight.copy_(weight.roll(1, 0))
            misplaced = model(input_ids=PROMPT, use_cache=False).logits
        print(json.dumps({"logits": logits.flatten().tolist(), "misplaced": misplaced.flatten().tolist()}), flush=True)


main()
