// SPDX-License-Identifier: Apache-2.0

package kveventstest

import "github.com/tinylib/msgp/msgp"

// Event is an event in the encoding of an engine.
type Event []byte

// Stored returns a BlockStored event as a map, as newer releases encode it: blocks with these hashes, of size tokens each.
// No parent is -1.
func Stored(parent int64, hashes []int64, tokens []int32, size int) Event {
	b := msgp.AppendMapHeader(nil, 7)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = appendHashes(msgp.AppendString(b, "block_hashes"), hashes)
	b = appendParent(msgp.AppendString(b, "parent_block_hash"), parent)
	b = appendTokens(msgp.AppendString(b, "token_ids"), tokens)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), size)
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	return msgp.AppendString(msgp.AppendString(b, "a_member_of_the_future"), "ignored")
}

// StoredArray returns a BlockStored event as an array, as older releases encode it, with further elements.
func StoredArray(parent int64, hashes []int64, tokens []int32, size int, more ...any) Event {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, uint32(6+len(more))), "BlockStored")
	b = appendTokens(appendParent(appendHashes(b, hashes), parent), tokens)
	b = msgp.AppendNil(msgp.AppendInt(b, size)) // lora_id
	return appendAll(b, more)
}

// Removed returns a BlockRemoved event.
func Removed(hashes ...int64) Event {
	b := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 3), "type"), "BlockRemoved")
	b = appendHashes(msgp.AppendString(b, "block_hashes"), hashes)
	return msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
}

// RemovedArray returns a BlockRemoved event as an array.
func RemovedArray(medium any, hashes ...int64) Event {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 3), "BlockRemoved")
	return appendAll(appendHashes(b, hashes), []any{medium})
}

// Cleared returns an AllBlocksCleared event.
func Cleared() Event { return msgp.AppendString(msgp.AppendArrayHeader(nil, 1), "AllBlocksCleared") }

// Batch returns a batch of a rank; -1 names no rank.
func Batch(rank int, events ...Event) []byte {
	b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1.5)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for _, e := range events {
		b = append(b, e...)
	}
	if rank < 0 {
		return msgp.AppendNil(b)
	}
	return msgp.AppendInt(b, rank)
}

func appendHashes(b []byte, hashes []int64) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for _, hash := range hashes {
		b = msgp.AppendInt64(b, hash)
	}
	return b
}

func appendParent(b []byte, parent int64) []byte {
	if parent == -1 {
		return msgp.AppendNil(b)
	}
	return msgp.AppendInt64(b, parent)
}

func appendTokens(b []byte, tokens []int32) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, token := range tokens {
		b = msgp.AppendInt32(b, token)
	}
	return b
}

func appendAll(b []byte, values []any) []byte {
	for _, value := range values {
		var err error
		if b, err = msgp.AppendIntf(b, value); err != nil {
			panic(err) // only types of this package's callers
		}
	}
	return b
}
