// SPDX-License-Identifier: Apache-2.0

// Package kvevents reads the KV events of engines, and finds the prompts whose beginning an engine rank has cached.
//
// vLLM and SGLang publish each change of a rank's prefix cache on a ZeroMQ PUB socket: BlockStored with the token IDs
// of the blocks, BlockRemoved and AllBlocksCleared. Rank r of a pod publishes at the configured port plus r. A ROUTER
// socket replays recent events, at the configured port plus the number of ranks plus r.
//
//	zmtp.go           a client of ZMTP 3.0 (rfc.zeromq.org/spec/23), for SUB and DEALER sockets without security
//	decode.go         the MessagePack batches of both engines, as arrays and as maps
//	rank.go           the blocks that a rank has cached
//	lookup.go         the cached part of a prompt, by rank
//	subscriber.go     one subscription per rank, with replay and reconnect
//	metrics.go        metrics
//
// Invariants:
//   - The index underestimates: a block is only found if the engine has reported its token IDs and those of all blocks
//     before it, and not its removal. Blocks with more keys than their tokens (LoRA adapters, images, salts) are not
//     indexed.
//   - After lost or malformed events, the blocks of the rank are forgotten, because a removal may be among the lost
//     events. The subscription goes on. Serving does not depend on it: without events, the router estimates prefixes
//     from the requests that it has sent.
//   - All memory is bounded, whatever an engine sends: message size, blocks per rank, blocks in total, subscriptions.
//   - No lock is held while a prompt is tokenized or hashed, or during I/O.
package kvevents
