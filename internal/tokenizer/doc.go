// Package tokenizer reads Hugging Face tokenizer.json files and turns text into token ids and back.
//
// Supported is byte-level BPE without a normalizer, with GPT-2's pre-tokenization; every other construct is refused by
// name when the file is read, because a tokenizer that is almost right changes what a model says without a sign.
//
// Invariants:
//   - Encode gives the ids that the reference implementation gives.
//   - Decode(Encode(s)) == s for every valid UTF-8 string s, and DecodeBytes(Encode(s)) == s for every string.
//   - A Tokenizer is immutable apart from its cache of words and safe for concurrent use; a Stream is not.
package tokenizer
