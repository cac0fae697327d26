// SPDX-License-Identifier: Apache-2.0

// Package tokenizer reads the tokenizers of Hugging Face checkpoints, and encodes text to token ids and back. It reads
// tokenizer.json, and the tiktoken.model of Kimi-K2.
//
// It supports BPE, of bytes or with byte fallback, with the normalizers, pre-tokenizers and added tokens that the
// families of mixture-of-experts models use. Every other construct is refused by name when the file is read, because a
// slightly wrong tokenizer silently changes the output of a model. A post-processor is accepted but not applied: Encode
// adds no tokens before or after a text.
//
// Text is cut into pieces. Known split expressions, recognised by their exact text, are implemented by hand-written
// functions, all others by the package pattern; lower-case ASCII words need neither. A piece that is one token is found
// by a lookup in a table that is immutable after loading. The tokens of other short pieces are cached in a cache of
// bounded size. In front of both, each text that is being encoded uses a small cache of the most frequent pieces.
//
// Invariants:
//   - Encode returns the same ids as the reference implementation, except for characters added to Unicode after the
//     version of Go's tables, which count as unassigned. The knowledge about the reference comes from the golden files
//     in testdata.
//   - Decode(Encode(s)) == s for every valid UTF-8 string s, and DecodeBytes(Encode(s)) == s for every string, if the
//     file has no normalizer and adds no space. With a normalizer, the result is the normalized s.
//   - Encoding n bytes takes O(n log n) time and O(n) memory for every input and file. Parse refuses a file
//     that exceeds maxSteps, maxGrowth, maxAddedToken or the limits of package pattern.
//   - A Tokenizer is immutable except for its caches of pieces, and safe for concurrent use. A Stream is not.
package tokenizer
