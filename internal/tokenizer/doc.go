// Package tokenizer reads the tokenizers of Hugging Face checkpoints and turns text into token ids and back. It reads tokenizer.json, and
// the tiktoken.model of Kimi-K2.
//
// Supported is BPE, of bytes or with fallback to bytes, with the normalizers, pre-tokenizers and added tokens that the
// families of mixture-of-experts models use; every other construct is refused by name when the file is read, because a
// tokenizer that is almost right changes what a model says without a sign. A post-processor is accepted and not applied:
// Encode puts nothing before or behind a text.
//
// Text is cut into pieces by a function written for the family's expression where it is known by its exact wording, else by
// the package pattern. A piece that is one token is found whole, in a table that is not written to after the file is read;
// the tokens of other short pieces are remembered in a cache of bounded size.
//
// Invariants:
//   - Encode gives the ids that the reference implementation gives, but for characters that Unicode has gained since the
//     version of Go's tables, which count as unassigned. What is known of the reference was read off the goldens of
//     testdata.
//   - Decode(Encode(s)) == s for every valid UTF-8 string s, and DecodeBytes(Encode(s)) == s for every string, where the file
//     has no normalizer and adds no space; with one, it is what the normalizer makes of s.
//   - Encoding n bytes takes O(n log n), and memory in proportion to n, whatever the bytes and the file are. Parse refuses a file with
//     factors above the limits of maxSteps, maxGrowth, maxAddedToken and package pattern.
//   - A Tokenizer is immutable apart from its cache of pieces and safe for concurrent use; a Stream is not.
package tokenizer
