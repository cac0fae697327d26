// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// kind is the kind of an event.
type kind int

const (
	// otherKind is a kind that is not known. Such events are ignored.
	otherKind kind = iota
	stored
	removed
	cleared
)

// noRank and noGroup stand for members that an event does not have.
const noRank, noGroup = -1, -1

// outside is the ID of a token that is no int32.
const outside = -1

// event is a decoded event. Its members are not checked against each other.
type event struct {
	kind kind
	// hashes are the engine's hashes of the blocks, parent that of the block before the first one; hasParent is false for
	// the first block of a prompt.
	hashes    []uint64
	parent    uint64
	hasParent bool
	// tokens are the token IDs of the blocks, size the number of tokens of a block.
	tokens []int32
	size   int
	// medium is where the blocks are; empty and GPU are the memory of the device.
	medium string
	// group is the group of a model with several kinds of attention.
	group int
	// keyed is true if the blocks depend on more than their tokens, such as a LoRA adapter. keyedBlocks are the numbers of
	// single blocks that do.
	keyed       bool
	keyedBlocks []int
	// adapter is the name of the LoRA adapter, unnamed is true for one without a name.
	adapter string
	unnamed bool
}

// errMalformed is returned for bytes that are no batch of events.
var errMalformed = errors.New("the batch of events is malformed")

func malformed(what string, cause error) error {
	if cause == nil {
		return fmt.Errorf("%w: %s", errMalformed, what)
	}
	return fmt.Errorf("%w: %s: %w", errMalformed, what, cause)
}

// maxEvents is the maximum number of events of a batch. An engine reports the blocks of one step, some thousand at most.
const maxEvents = 1 << 16

// decodeBatch decodes a batch: an array of a time, the events and, if known, the rank. Further elements are ignored.
func decodeBatch(payload []byte) (events []event, rank int, err error) {
	n, rest, err := arrayHeader(payload)
	if err != nil || n < 2 {
		return nil, 0, malformed("want [time, events, rank]", err)
	}
	if rest, err = msgp.Skip(rest); err != nil { // the time
		return nil, 0, malformed("time", err)
	}
	count, rest, err := arrayHeader(rest)
	if err != nil || count > maxEvents {
		return nil, 0, malformed(fmt.Sprintf("%d events; want %d at most", count, maxEvents), err)
	}
	for i := range count {
		var e event
		if e, rest, err = decodeEvent(rest); err != nil {
			return nil, 0, fmt.Errorf("event %d: %w", i, err)
		}
		events = append(events, e)
	}
	if rank = noRank; n > 2 && !msgp.IsNil(rest) {
		if rank, _, err = readInt(rest); err != nil {
			return nil, 0, malformed("rank", err)
		}
	}
	return events, rank, nil
}

// arrayHeader reads the header of an array. It refuses more elements than there are bytes.
func arrayHeader(b []byte) (n int, rest []byte, err error) {
	size, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err == nil && uint64(size) > uint64(len(rest)) {
		err = fmt.Errorf("%d elements in %d bytes", size, len(rest))
	}
	return int(size), rest, err
}

// positions are the names of the members of events that are encoded as arrays, after the name of the kind: vLLM up to
// vllm-project/vllm#42892, and SGLang's earlier releases, which have a part of them.
var positions = map[kind][]string{
	stored:  {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx"},
	removed: {"block_hashes", "medium", "group_idx"},
}

var kinds = map[string]kind{"BlockStored": stored, "BlockRemoved": removed, "AllBlocksCleared": cleared}

// decodeEvent decodes an event: an array that begins with the name of its kind, or a map with this name as type. Members
// that are not known are ignored.
func decodeEvent(b []byte) (e event, rest []byte, err error) {
	e.group = noGroup
	if msgp.NextType(b) == msgp.MapType {
		return decodeMap(b)
	}
	n, rest, err := arrayHeader(b)
	if err != nil || n == 0 {
		return e, nil, malformed("want an array or a map", err)
	}
	name, rest, err := msgp.ReadStringZC(rest)
	if err != nil {
		return e, nil, malformed("kind", err)
	}
	e.kind = kinds[string(name)]
	for i := range n - 1 {
		if names := positions[e.kind]; i < len(names) {
			rest, err = e.decodeMember(names[i], rest)
		} else {
			rest, err = msgp.Skip(rest)
		}
		if err != nil {
			return e, nil, malformed(fmt.Sprintf("element %d of %.40q", i+1, name), err)
		}
	}
	return e, rest, e.check()
}

func decodeMap(b []byte) (e event, rest []byte, err error) {
	e.group = noGroup
	n, rest, err := msgp.ReadMapHeaderBytes(b)
	if err != nil || uint64(n) > uint64(len(rest)) {
		return e, nil, malformed("map", err)
	}
	for range n {
		var name []byte
		if name, rest, err = msgp.ReadStringZC(rest); err != nil {
			return e, nil, malformed("name of a member", err)
		}
		if rest, err = e.decodeMember(string(name), rest); err != nil {
			return e, nil, malformed(fmt.Sprintf("member %.40q", name), err)
		}
	}
	return e, rest, e.check()
}

// check returns an error for members that contradict each other.
func (e *event) check() error {
	switch {
	case e.kind != stored:
		return nil
	case e.size < 1:
		return malformed(fmt.Sprintf("block_size %d", e.size), nil)
	case len(e.tokens) != e.size*len(e.hashes):
		return malformed(fmt.Sprintf("%d tokens in %d blocks of %d", len(e.tokens), len(e.hashes), e.size), nil)
	}
	return nil
}

// maxBlockSize is the maximum number of tokens of a block, far above those of engines.
const maxBlockSize = 1 << 16

func (e *event) decodeMember(name string, b []byte) (rest []byte, err error) {
	none := msgp.IsNil(b)
	if none && name != "type" {
		return msgp.Skip(b)
	}
	switch name {
	case "type":
		var text []byte
		text, rest, err = msgp.ReadStringZC(b)
		e.kind = kinds[string(text)]
	case "block_hashes":
		e.hashes, rest, err = readHashes(b)
	case "parent_block_hash":
		e.parent, rest, err = readHash(b)
		e.hasParent = true
	case "token_ids":
		e.tokens, rest, err = readTokens(b)
	case "block_size":
		if e.size, rest, err = readInt(b); err == nil && e.size > maxBlockSize {
			err = fmt.Errorf("%d is more than %d", e.size, maxBlockSize)
		}
	case "medium":
		e.medium, rest, err = readText(b)
	case "group_idx":
		e.group, rest, err = readInt(b)
	case "lora_name":
		e.keyed = true
		e.adapter, rest, err = readText(b)
	case "lora_id":
		e.keyed, e.unnamed = true, true
		rest, err = msgp.Skip(b)
	case "cache_salt":
		e.keyed = true
		rest, err = msgp.Skip(b)
	case "extra_keys":
		rest, err = e.readKeys(b)
	default:
		rest, err = msgp.Skip(b)
	}
	return rest, err
}

// readKeys reads the further keys of the blocks: a list with the keys of each block, or nil for none. In any other form,
// all blocks are taken to have keys.
func (e *event) readKeys(b []byte) ([]byte, error) {
	if msgp.NextType(b) != msgp.ArrayType {
		e.keyed = true
		return msgp.Skip(b)
	}
	n, rest, err := arrayHeader(b)
	for i := 0; i < n && err == nil; i++ {
		empty := msgp.IsNil(rest)
		if msgp.NextType(rest) == msgp.ArrayType {
			size, _, sizeErr := arrayHeader(rest)
			empty = sizeErr == nil && size == 0
		}
		if !empty {
			e.keyedBlocks = append(e.keyedBlocks, i)
		}
		rest, err = msgp.Skip(rest)
	}
	return rest, err
}

func readHashes(b []byte) (hashes []uint64, rest []byte, err error) {
	n, rest, err := arrayHeader(b)
	if err != nil {
		return nil, nil, err
	}
	hashes = make([]uint64, n)
	for i := range hashes {
		if hashes[i], rest, err = readHash(rest); err != nil {
			return nil, nil, err
		}
	}
	return hashes, rest, nil
}

// seed is the seed of all hashes of this package, which are never stored. Clients cannot predict the hash of a prompt.
var seed = maphash.MakeSeed()

// readHash reads the hash of a block: an integer, or bytes, which are hashed.
func readHash(b []byte) (uint64, []byte, error) {
	switch msgp.NextType(b) {
	case msgp.BinType:
		raw, rest, err := msgp.ReadBytesZC(b)
		return maphash.Bytes(seed, raw), rest, err
	case msgp.UintType:
		return msgp.ReadUint64Bytes(b)
	default:
		number, rest, err := msgp.ReadInt64Bytes(b)
		return uint64(number), rest, err
	}
}

// readTokens reads token IDs. SGLang with draft models of the EAGLE kind reports pairs of a token and the next one: the
// first one counts.
func readTokens(b []byte) (tokens []int32, rest []byte, err error) {
	n, rest, err := arrayHeader(b)
	if err != nil {
		return nil, nil, err
	}
	tokens = make([]int32, n)
	for i := range tokens {
		if msgp.NextType(rest) == msgp.ArrayType {
			var pair int
			if pair, rest, err = arrayHeader(rest); err != nil || pair != 2 {
				return nil, nil, fmt.Errorf("a token of %d numbers: %w", pair, err)
			}
			if tokens[i], rest, err = readToken(rest); err == nil {
				rest, err = msgp.Skip(rest)
			}
		} else {
			tokens[i], rest, err = readToken(rest)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	return tokens, rest, nil
}

func readToken(b []byte) (int32, []byte, error) {
	var id int64
	var rest []byte
	var err error
	if msgp.NextType(b) == msgp.UintType {
		var unsigned uint64
		unsigned, rest, err = msgp.ReadUint64Bytes(b)
		id = int64(min(unsigned, math.MaxInt64))
	} else {
		id, rest, err = msgp.ReadInt64Bytes(b)
	}
	if id < 0 || id > math.MaxInt32 {
		id = outside
	}
	return int32(id), rest, err
}

// readInt reads a number from 0 to math.MaxInt32.
func readInt(b []byte) (int, []byte, error) {
	number, rest, err := msgp.ReadInt64Bytes(b)
	if err == nil && (number < 0 || number > math.MaxInt32) {
		err = fmt.Errorf("%d is outside 0 to %d", number, math.MaxInt32)
	}
	return int(number), rest, err
}

// maxText bounds the names of media and adapters, which are only compared.
const maxText = 256

func readText(b []byte) (string, []byte, error) {
	text, rest, err := msgp.ReadStringZC(b)
	if err == nil && len(text) > maxText {
		err = fmt.Errorf("a text of %d bytes", len(text))
	}
	return string(text), rest, err
}
