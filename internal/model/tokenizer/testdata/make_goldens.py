#!/usr/bin/env python3
"""Trains a small tokenizer for each family of pipelines and writes what the reference implementation makes of odd texts.

Usage: make_goldens.py CORPUS OUT [RANDOM]

CORPUS is a directory of text files (test/corpus of this repository), OUT the directory to write to. It needs the Python
packages tokenizers, transformers and tiktoken; the files in this directory were made with tokenizers 0.23.2, and those of
call-settings and kimi with tokenizers 0.23.3, transformers 5.24.0 and tiktoken 0.14.0. Written are cases.json.gz (the texts),
FAMILY.json.gz (the tokenizer.json, and the token ids of each text without special tokens of the post-processor), and
patterns.json.gz (how Split cuts the texts by expressions that no family has). With RANDOM, a number, that many random
texts and their ids are written to random.json.gz as well.
"""
import base64
import gzip
import json
import pathlib
import random
import sys

import tiktoken
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
MARKS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", SPACES])
TEKKEN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", SPACES])
V3_DIGITS, V3_CJK = r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"
V3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
      + SPACES)
V2_LETTERS = ("\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
              "Ὑ\u1f5bὝ\u1f5fℂℊ-ℓℕℙ-ℝℤℨℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻꙀ-ꙭꚀ-ꚛꜢ-ꝯꭰ-ꮿﬀ-ﬆＡ-Ｚａ-ｚ𐐀-𐑏]+")
V2_PUNCTUATION, V2_CJK = "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "[一-龥ࠀ-一가-\ud7ff]+"

# Expressions that no family above has, for what reads any: alternation, groups, look-ahead, classes, quantifiers.
PATTERNS = [
    r"\w+|[^\w\s]+", r"\d{2,3}|\D", r"[\p{Han}]+|[\p{L}&&[^\p{Han}]]+|\s+$", r"(?:\p{L}\p{M}*)+|\P{L}", r"(?=[A-Z])\w+?x|.",
    r"^\s+|\s+$|\S+", r"\p{N}{1,3}+| ?\p{L}++", r"[^\n]+\n|.+", r"(?:ab|a)(?:c|bc)?", r"[\u4e00-\u9fff]{2}|\x{1F600}|\t",
    r"(?i:straSSe|[a-c]+)|\p{^L}", r"[\w&&[^\d_]]+", r"a{2}|b{,2}c|d{1,}", r"(a|b)*c|[[:alpha:]]+", r"\p{Lu}(?!\p{Lu})\p{Ll}*",
    r"(?:[A-Z][a-z]*){2,3}|\s*\n|\s{2,}", r"\p{Greek}+|\p{Cyrillic}+|\p{Hiragana}+|\p{P}", r"\Aa|\n|b\z", r"(?!x)\S+(?=\s)",
]
BEHAVIOURS = ["isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"]


def isolated(expression):
    return pre_tokenizers.Split(Regex(expression), "isolated")


def byte_level(*before, prefix=False, regex=False):
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    return pre_tokenizers.Sequence([*before, last]) if before else last


def special(*contents):
    return [AddedToken(c, special=True, normalized=False) for c in contents]


CHATML = special("<|endoftext|>", "<|im_start|>", "<|im_end|>") + [AddedToken(c, normalized=False) for c in ("<think>", "</think>")]
BARS = special("<|begin_of_text|>", "<|eot_id|>", "<|reserved_special_token_1|>", "<|reserved_special_token_12|>")
FULLWIDTH = special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>") + [
    AddedToken(c, normalized=True) for c in ("<｜User｜>", "<｜tool▁call▁begin｜>")]
ODD = [AddedToken("<mask>", lstrip=True, normalized=False), AddedToken("<sep>", rstrip=True, normalized=False),
       AddedToken("word", single_word=True, normalized=False), AddedToken("Ünï", normalized=True),
       AddedToken("<both>", lstrip=True, rstrip=True, single_word=True, normalized=True)]

# name: normalizer, pre-tokenizer, added tokens, ignore_merges
FAMILIES = {
    "gpt2": (None, byte_level(regex=True), special("<|endoftext|>"), False),
    "qwen3": (normalizers.NFC(), byte_level(isolated(CL100K % "")), CHATML, False),
    "qwen3.5": (normalizers.NFC(), byte_level(isolated(MARKS)), CHATML, False),
    "llama3": (None, byte_level(isolated(CL100K % "{1,3}")), BARS, True),
    "deepseek-v2": (normalizers.Sequence([]), byte_level(
        *map(isolated, [r"[\r\n]", V2_LETTERS, V2_PUNCTUATION, r"\s+$", V2_CJK]), pre_tokenizers.Digits(True)), FULLWIDTH, False),
    "deepseek-v3": (normalizers.Sequence([]), byte_level(*map(isolated, [V3_DIGITS, V3_CJK, V3])), FULLWIDTH, False),
    "o200k": (None, byte_level(isolated(O200K)), BARS, False),
    "tekken": (None, byte_level(isolated(TEKKEN)), BARS, True),
    "odd": (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s{2,}"), "  "),
                                  normalizers.Replace("–", "-")]),
            byte_level(pre_tokenizers.Digits(False), pre_tokenizers.Punctuation(), prefix=True, regex=True), ODD, False),
    "mixtral": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None,
                special("<unk>", "<s>", "</s>"), False),
    "mixtral-metaspace": (None, pre_tokenizers.Metaspace("▁", "first", False), special("<unk>", "<s>", "</s>"), False),
    "metaspace-split": (None, pre_tokenizers.Metaspace("▁", "always", True), special("<unk>", "<s>", "</s>"), False),
}

# Families without a byte-level alphabet: characters outside of the vocabulary fall back to tokens for their bytes.
FALLBACK = {"mixtral", "mixtral-metaspace", "metaspace-split"}

HAND = [
    "", " ", "  ", "\n", "\r\n", "\t", "a", " a", "a ", "a  b", "   leading", "trailing   ", "\n\n x", "x\n\n\ny", "a\r\nb\r\n\r\nc", "a \n b", "a\t\tb",
    "don't we'll I'D they'RE '' 'x 's", " 's", "IT'S THEY'LL WE'VE I'M HE'D CAN'T", "it\u2019s", "'ſ x'ſ", "x'\u212a", "'\u0130", "1234 12a a12 ½Ⅷ٣", "1234567890", "3.14159e-10",
    "１２３４", "一二三１23", "日本語 テスト\u3000全角", "今天天气很好，我们去公园吧。", "한국어 텍스트 예제입니다", "หนึ่งสองสาม", "नमस्ते दुनिया", "مرحبا بالعالم ١٢٣", "שלום עולם",
    "naïve – “quoted”", "e\u0301 \u0300 a\u0308\u0323", "\u1e9b\u0323", "ﬁ ﬂ ﬆ", "Å \u212b A\u030a", "각 \u1100\u1161\u11a8", "😀🚀", "👨\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪🇫🇷 ❤\ufe0f",
    "\u0085\u00a0x", "a\u2028b\u2029c", "\u200bzero\u200bwidth\ufeff", "\x00\x01\x7f", "\x1c\x1d x", "İstanbul ıI iİ", "ΑΣ Σίσυφος", "ǅungla ǈ ʰʷ", "𝒳𝔄 𐐷𐐏", "\ufffd \ufffe \U0010ffff",
    "\u0300a", " \u0300\u0301", "x\u20dd", "a\u200d\u0300b", "\u0903\u0904", "CamelCaseWords HTTPServer XMLHttpRequest2", "snake_case_words __init__", "a/b/c //x /// \n/", "http://example.com/a?b=c&d=%20#e",
    "x = {'a': [1, 2.5], \"b\": None}\n\n\tdef f(self):\n\t\treturn x ** 2  # ok\r\n", "if (a&&b||!c) { return a->b; }\n", "!!!???...", " ...", "  ...\n\n", "...\n\n  x", "$100,000.00 €5 £3 ¥7",
    "#include <stdio.h>\nint main() { printf(\"%d\\n\", 1); }", "SELECT * FROM t WHERE id=1;--x", "a" * 40, "ab" * 30, " " * 50, " " * 50 + "x", "x" + " " * 50, "\n" * 20, " \n" * 10, "-" * 45, "1" * 25,
    "<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext", "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>", "<|begin_of_text|>x<|reserved_special_token_12|><|reserved_special_token_1|>2",
    "<｜begin▁of▁sentence｜>hi<｜User｜>x<｜tool▁call▁begin｜>", "x <mask> y", "x <mask>  <sep>  y", "word words sword a word.word _word", " Ünï ünï U\u0308nï", "a <both> b<both>c  <both>  ", "<s>x</s> y",
    "▁a ▁ b▁", " ▁ x", "<0x0A> <0xff>", "a\u00adb", "１，２", "「こんにちは」と言った。", "価格は１２００円です！", "ｶﾀｶﾅ ﾊﾟ", "ー゛゜ゟ", "㍿㌀①②", "龥龦 ࠀ", "Привет, мир! Ёлка", "Ωμέγα ἀρχή", "Հայերեն", "ქართული",
    "C++ C# .NET F#", "a'b'c", "''s", "x's's", "'S 'T 'RE", "1's 2'll", "\u00a0\u00a0x", "x\u3000\u3000y", "\u2003\n", "a\x0bb\x0cc", "\r", "\r\r\n", "x\r", "~~~`code`~~~", "* item\n  * sub\n", "|a|b|\n|-|-|",
    "λ→∀x∃y∈ℝ", "½+⅓", "x²+y₂", "H₂O", "™©®", "ªº", "ⅷⅨ", "〇〡", "𝟘𝟙", "\u06dd١", "\ue000", "🏴\U000e0067\U000e0062\U000e007f", "a\U000e0100",
]
PARTS = ["a", "B", "é", "ß", "ſ", "İ", "ǅ", "ʰ", "的", "日", "本", "ア", "ー", "한", "ก", "\u0e34", "\u0300", "\u0308", "\u093f", "\u200d", "1", "23", "456", "٣", "½", "Ⅷ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000",
         "\u2028", "'", "'s", "'LL", "'re", ".", ",", "!", "/", "//", "-", "_", "(", "\"", "“", "、", "。", "€", "+", "=", "😀", "👍🏽", "\x00", "\u200b", "the", " The", " of", "HTTP", "Http", "word", "<mask>", "<|endoftext|>", "▁"]


def random_texts(count, seed):
    generator = random.Random(seed)
    return ["".join(generator.choices(PARTS, k=generator.randint(2, 16))) for _ in range(count)]


def read_corpus(directory):
    return [p.read_text() for p in sorted(pathlib.Path(directory).glob("*/*")) if p.suffix != ".go" and p.is_file()]


def cut(texts, seed, size):
    generator = random.Random(seed)
    parts = []
    for text in texts:
        start = generator.randrange(max(1, len(text) - size))
        parts.append(text[start:start + size])
    return parts


def train(name, corpus):
    normalizer, pre_tokenizer, added, ignore_merges = FAMILIES[name]
    if name in FALLBACK:
        return train_fallback(normalizer, pre_tokenizer, added, corpus)
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    # One part is trained with, the other is not, so that some entries of the vocabulary are out of reach of the merges.
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    if ignore_merges:
        tokenizer = with_unreachable(tokenizer)
    tokenizer.add_tokens(added)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False)] + (
        [processors.TemplateProcessing(single=f"{added[0].content} $A", pair="$A $B", special_tokens=[(added[0].content, tokenizer.token_to_id(added[0].content))])]
        if added[0].special else []))
    return tokenizer


def with_unreachable(tokenizer):
    """Adds vocabulary entries that no merge makes: only ignore_merges finds them."""
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    for word in ("Ġwonderful", "Schifffahrt", "ç½ĳç»ľ", "123"):
        vocab.setdefault(word, len(vocab))
    return Tokenizer.from_str(json.dumps(content))


def train_fallback(normalizer, pre_tokenizer, added, corpus):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", True)
    trainer = trainers.BpeTrainer(vocab_size=1500, limit_alphabet=300, show_progress=False,
                                  special_tokens=[a.content for a in added] + [f"<0x{b:02X}>" for b in range(256)])
    tokenizer.train_from_iterator(corpus, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is None:
        content = json.loads(tokenizer.to_str())
        content["pre_tokenizer"] = None
        tokenizer = Tokenizer.from_str(json.dumps(content))
    else:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def ids(tokenizer, texts):
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+" + CONTRACTIONS + "?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*" + CONTRACTIONS + "?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def kimi(corpus, texts):
    """A checkpoint's tiktoken.model and tokenizer_config.json in the form of Kimi-K2's, and what tiktoken makes of the texts."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = byte_level(isolated(KIMI))
    trained.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    model = json.loads(trained.to_str())["model"]
    from_byte = bytes_alphabet()
    order = sorted(model["vocab"], key=model["vocab"].get)
    ranks = {bytes(from_byte[c] for c in token): i for i, token in enumerate(order)}
    for more in (b"aa", b"aaa", b" wonderful", "网络".encode()):  # some are out of reach of merges, aaa can be made in two ways
        ranks.setdefault(more, len(ranks))
    base = len(ranks)
    added = {base: "[BOS]", base + 1: "[EOS]", base + 2: "<|im_end|>", base + 3: "<|im_user|>", base + 4: "<think>", base + 255: "[PAD]"}
    special = {added.get(i, f"<|reserved_token_{i}|>"): i for i in range(base, base + 258)}
    encoding = tiktoken.Encoding(name="kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)
    texts = texts + ["[BOS]hi<|im_end|>", f"<|im_user|>x<|reserved_token_{base + 9}|>y", "aa aaaa aaaaa aaaaaaa " + "a" * 150, "HTTP说话Http的", " wonderful 网络"]
    return {
        "model": "".join(f"{base64.b64encode(t).decode()} {i}\n" for t, i in ranks.items()),
        "config": {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                   "added_tokens_decoder": {str(i): {"content": c, "special": c != "<think>", "lstrip": False} for i, c in added.items()}},
        "texts": texts, "ids": [encoding.encode(t, allowed_special="all") for t in texts]}


def bytes_alphabet():
    printable = [*range(ord("!"), ord("~") + 1), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def call_settings(content, texts):
    """A tokenizer.json with truncation and padding, and what engines get from it by way of transformers."""
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    stored = json.loads(tokenizer.to_str())
    assert stored["truncation"] and stored["padding"] and len(tokenizer.encode(texts[-1], add_special_tokens=False).ids) == 16
    engine = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(stored)))
    return {"tokenizer": stored, "ids": [engine(t, add_special_tokens=False)["input_ids"] for t in texts]}


def cuts(texts):
    """How Split cuts texts: for each expression and behaviour, the pieces of each text, or the error."""
    made = []
    for expression in PATTERNS:
        for behaviour in BEHAVIOURS:
            for invert in (False, True):
                try:
                    split = pre_tokenizers.Split(Regex(expression), behaviour, invert)
                    made.append({"pattern": expression, "behaviour": behaviour, "invert": invert,
                                 "pieces": [[p for p, _ in split.pre_tokenize_str(t)] for t in texts]})
                except Exception as error:  # the reference refuses some expressions too
                    print("refused:", expression, error)
                    break
    return made


def write(directory, name, content):
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    packed = gzip.compress(text, 9, mtime=0)
    (pathlib.Path(directory) / name).write_bytes(packed)
    print(name, len(packed))


def main():
    corpus, out = read_corpus(sys.argv[1]), sys.argv[2]
    print("tokenizers", tokenizers.__version__, "documents", len(corpus))
    texts = list(dict.fromkeys(HAND + random_texts(140, 1) + cut(corpus[::4], 2, 120)))
    write(out, "cases.json.gz", texts)
    write(out, "patterns.json.gz", {"texts": (split_texts := texts[:60] + random_texts(30, 3)), "cuts": cuts(split_texts)})
    more = {"texts": random_texts(int(sys.argv[3]), 4) + cut(corpus, 5, 2000)} if len(sys.argv) > 3 else None
    for name in FAMILIES:
        tokenizer = train(name, corpus)
        content = json.loads(tokenizer.to_str())
        write(out, name + ".json.gz", {"tokenizer": content, "ids": ids(tokenizer, texts)})
        if more:
            more[name] = ids(tokenizer, more["texts"])
        if name == "qwen3":
            write(out, "call-settings.json.gz", call_settings(content, texts))
    write(out, "kimi.json.gz", kimi(corpus, texts))
    if more:
        write(out, "random.json.gz", more)


if __name__ == "__main__":
    main()
