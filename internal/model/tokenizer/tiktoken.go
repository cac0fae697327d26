// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/files/regularfile"
)

const (
	tokenizerFile = "tokenizer.json"
	tiktokenFile  = "tiktoken.model"
	configFile    = "tokenizer_config.json"
)

// rankedModel is the type of a model with merges that follow from its vocabulary, as in the library tiktoken: two
// neighbours can be merged if their concatenation is a token, and the merge with the lowest token id is applied first.
// Only FromCheckpoint produces this type.
const rankedModel = "tiktoken"

// FromCheckpoint returns a checkpoint's tokenizer as the content of a tokenizer.json for Parse. If the checkpoint has
// no tokenizer.json, it converts tiktoken.model and the tokens of tokenizer_config.json. It returns fs.ErrNotExist if
// both files are missing.
func FromCheckpoint(dir string) ([]byte, error) {
	text, err := readFile(filepath.Join(dir, tokenizerFile))
	if !errors.Is(err, fs.ErrNotExist) {
		return text, err
	}
	ranks, tiktokenErr := readFile(filepath.Join(dir, tiktokenFile))
	if errors.Is(tiktokenErr, fs.ErrNotExist) {
		return nil, err // tokenizer.json is missing
	}
	if tiktokenErr != nil {
		return nil, tiktokenErr
	}
	config, err := readFile(filepath.Join(dir, configFile))
	if err != nil {
		return nil, err
	}
	text, err = fromTiktoken(dir, ranks, config)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, tiktokenFile), err)
	}
	return text, nil
}

// LoadCheckpoint loads the tokenizer that FromCheckpoint returns.
func LoadCheckpoint(dir string) (*Tokenizer, error) {
	text, err := FromCheckpoint(dir)
	if err != nil {
		return nil, err
	}
	t, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("failed to parse tokenizer in %s: %w", dir, err)
	}
	return t, nil
}

// kimiPatterns are the alternatives, in order, of the split expression in Kimi-K2's tokenization_kimi.py.
var kimiPatterns = []string{
	`[\p{Han}]+`,
	`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?`,
	`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?`,
	`\p{N}{1,3}`,
	` ?[^\s\p{L}\p{N}]+[\r\n]*`,
	`\s*[\r\n]+`,
	`\s+(?!\S)`,
	`\s+`,
}

// kimiReserved is the number of token ids after the ranks that Kimi-K2 reserves for special tokens.
const kimiReserved = 258

// tiktokenConfig is the part of tokenizer_config.json that describes special tokens and the code that reads them.
type tiktokenConfig struct {
	Class   string                     `json:"tokenizer_class"`
	AutoMap map[string]json.RawMessage `json:"auto_map"`
	Added   map[string]fileAddedToken  `json:"added_tokens_decoder"`
}

// fromTiktoken converts the ranks of a tiktoken.model. The split expression is only defined in Python code. Therefore
// only the class of Kimi-K2 is converted, after a check of its code if the checkpoint contains the code.
func fromTiktoken(dir string, text, config []byte) ([]byte, error) {
	var c tiktokenConfig
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", configFile, err)
	}
	if c.Class != "TikTokenTokenizer" {
		return nil, unsupported("%s with tokenizer_class %q of %s; only Kimi's TikTokenTokenizer is supported", tiktokenFile, c.Class, configFile)
	}
	if err := c.checkCode(dir); err != nil {
		return nil, err
	}
	vocabulary, err := parseRanks(text)
	if err != nil {
		return nil, err
	}
	added, err := c.specialTokens(len(vocabulary))
	if err != nil {
		return nil, err
	}
	type object map[string]any
	return json.Marshal(object{
		"added_tokens": added,
		"pre_tokenizer": object{"type": "Sequence", "pretokenizers": []object{
			{"type": "Split", "behavior": "Isolated", "pattern": object{"Regex": strings.Join(kimiPatterns, "|")}},
			{"type": "ByteLevel", "use_regex": false, "add_prefix_space": false},
		}},
		"decoder": object{"type": "ByteLevel"},
		"model":   object{"type": rankedModel, "ignore_merges": true, "vocab": vocabulary},
	})
}

// checkCode refuses Python code that uses another split expression, or that reserves another number of tokens. If the
// checkpoint does not contain the code, only the class name is checked.
func (c *tiktokenConfig) checkCode(dir string) error {
	classes := c.AutoMap["AutoTokenizer"]
	var slowAndFast []string
	if len(classes) == 0 || json.Unmarshal(classes, &slowAndFast) != nil || len(slowAndFast) == 0 {
		return nil
	}
	module, _, _ := strings.Cut(slowAndFast[0], ".")
	const maxCode = 1 << 20
	code, err := regularfile.Read(filepath.Join(dir, filepath.Base(module+".py")), maxCode)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	rest := code
	for _, wanted := range append([]string{fmt.Sprintf("num_reserved_special_tokens = %d", kimiReserved-2)}, kimiPatterns...) {
		_, after, found := bytes.Cut(rest, []byte(wanted))
		if !found {
			return unsupported("%s.py does not contain %q; only the code of Kimi-K2 is supported", module, wanted)
		}
		rest = after
	}
	return nil
}

// parseRanks parses lines with the bytes of a token, in base64, and its rank, which is its id.
func parseRanks(text []byte) (map[string]int32, error) {
	vocabulary := make(map[string]int32, bytes.Count(text, []byte("\n"))+1)
	number := 0
	for line := range bytes.Lines(text) {
		number++
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		encoded, rank, _ := bytes.Cut(line, []byte(" "))
		piece, err := base64.StdEncoding.DecodeString(string(encoded))
		if err != nil || len(piece) == 0 {
			return nil, fmt.Errorf("line %d: %.40q is invalid: it must be a token in base64, a space and the token's rank", number, line)
		}
		id, err := strconv.ParseInt(string(rank), 10, 32)
		if err != nil || id < 0 || id > maxTokenID {
			return nil, fmt.Errorf("line %d: rank %.20q is invalid: allowed is 0 to %d", number, rank, maxTokenID)
		}
		written := toByteAlphabet(piece)
		if _, twice := vocabulary[written]; twice {
			return nil, fmt.Errorf("line %d: token %.40q has two ranks", number, piece)
		}
		vocabulary[written] = int32(id)
	}
	for _, id := range vocabulary {
		if int(id) >= len(vocabulary) {
			return nil, fmt.Errorf("rank %d is invalid: the ranks of %d tokens must be 0 to %d", id, len(vocabulary), len(vocabulary)-1)
		}
	}
	return vocabulary, nil
}

// specialTokens returns the tokens after the ranks: those of added_tokens_decoder, and reserved tokens for the other
// ids.
func (c *tiktokenConfig) specialTokens(base int) ([]fileAddedToken, error) {
	if len(c.Added) == 0 {
		return nil, unsupported("%s without added_tokens_decoder in %s", tiktokenFile, configFile)
	}
	byID := map[int]fileAddedToken{}
	for key, token := range c.Added {
		id, err := strconv.Atoi(key)
		if err != nil || token.Content == "" {
			return nil, fmt.Errorf("%s: added_tokens_decoder: %.40q: %.40q is invalid: it must map a token id to a token", configFile, key, token.Content)
		}
		byID[id] = token
	}
	var list []fileAddedToken
	for id := base; id < base+kimiReserved; id++ {
		token, named := byID[id]
		if !named {
			token = fileAddedToken{Content: fmt.Sprintf("<|reserved_token_%d|>", id), Special: true}
		}
		// The reference matches the content of these tokens without normalization.
		list = append(list, fileAddedToken{ID: int32(id), Content: token.Content, Special: token.Special})
	}
	return list, nil
}

// maxRankedBytes is the maximum length in bytes of a token that must be merged from others. Finding its parts takes
// quadratic time.
const maxRankedBytes = 512

// rank adds the merges that follow from the vocabulary of a ranked model: all pairs of tokens that concatenate to a
// token.
func (m *fileModel) rank() error {
	for _, joined := range slices.SortedFunc(maps.Keys(m.Vocab), func(a, b string) int { return cmp.Compare(m.Vocab[a], m.Vocab[b]) }) {
		if len(joined) > 2*maxRankedBytes { // each byte is encoded in at most two
			return fmt.Errorf("token %d has more than %d bytes", m.Vocab[joined], maxRankedBytes)
		}
		for at := range joined {
			if at == 0 {
				continue
			}
			_, left := m.Vocab[joined[:at]]
			_, right := m.Vocab[joined[at:]]
			if left && right {
				m.Merges = append(m.Merges, [2]string{joined[:at], joined[at:]})
			}
		}
	}
	return nil
}
