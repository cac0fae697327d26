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

	"github.com/semmoe/operator/internal/regularfile"
)

const (
	tokenizerFile = "tokenizer.json"
	tiktokenFile  = "tiktoken.model"
	configFile    = "tokenizer_config.json"
)

// rankedModel is the type of a model whose merges follow from its vocabulary, as in the library tiktoken: any two neighbours whose
// concatenation is a token can be merged, and the one of the lowest token id is first. Only FromCheckpoint writes the type.
const rankedModel = "tiktoken"

// FromCheckpoint returns a checkpoint's tokenizer as the content of a tokenizer.json, which Parse reads. It converts a tiktoken.model with
// the tokens of tokenizer_config.json where the checkpoint has no tokenizer.json. Without both it returns fs.ErrNotExist.
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

// LoadCheckpoint reads the tokenizer that FromCheckpoint returns.
func LoadCheckpoint(dir string) (*Tokenizer, error) {
	text, err := FromCheckpoint(dir)
	if err != nil {
		return nil, err
	}
	t, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("tokenizer in %s: %w", dir, err)
	}
	return t, nil
}

// kimiPatterns are the alternatives of the expression by which Kimi-K2's tokenization_kimi.py cuts text, in their order.
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

// kimiReserved is the number of token ids behind the ranks that Kimi-K2 keeps for special tokens.
const kimiReserved = 258

// tiktokenConfig is the part of tokenizer_config.json that describes special tokens and the code that reads them.
type tiktokenConfig struct {
	Class   string                     `json:"tokenizer_class"`
	AutoMap map[string]json.RawMessage `json:"auto_map"`
	Added   map[string]fileAddedToken  `json:"added_tokens_decoder"`
}

// fromTiktoken converts the ranks of a tiktoken.model. How text is cut is written in Python code only, so that it converts only what it
// knows: Kimi-K2's class, and its code where the checkpoint has it.
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

// checkCode refuses Python code that cuts text by another expression, or reserves another number of tokens. A checkpoint without the code
// is read by its class.
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
		_, behind, found := bytes.Cut(rest, []byte(wanted))
		if !found {
			return unsupported("%s.py has no %q; only the code of Kimi-K2 is known", module, wanted)
		}
		rest = behind
	}
	return nil
}

// parseRanks reads lines of a token's bytes, as base64, and its rank, which is its id.
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
			return nil, fmt.Errorf("line %d: %.40q is invalid: a token in base64, a space and its rank are wanted", number, line)
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
			return nil, fmt.Errorf("rank %d is invalid: %d tokens have the ranks 0 to %d", id, len(vocabulary), len(vocabulary)-1)
		}
	}
	return vocabulary, nil
}

// specialTokens returns the tokens behind the ranks: those of added_tokens_decoder, and reserved ones under the other ids.
func (c *tiktokenConfig) specialTokens(base int) ([]fileAddedToken, error) {
	if len(c.Added) == 0 {
		return nil, unsupported("%s without added_tokens_decoder in %s", tiktokenFile, configFile)
	}
	byID := map[int]fileAddedToken{}
	for key, token := range c.Added {
		id, err := strconv.Atoi(key)
		if err != nil || token.Content == "" {
			return nil, fmt.Errorf("%s: added_tokens_decoder: %.40q: %.40q is invalid: a token id with a token is wanted", configFile, key, token.Content)
		}
		byID[id] = token
	}
	var list []fileAddedToken
	for id := base; id < base+kimiReserved; id++ {
		token, named := byID[id]
		if !named {
			token = fileAddedToken{Content: fmt.Sprintf("<|reserved_token_%d|>", id), Special: true}
		}
		// The reference finds the content of these tokens as it is written.
		list = append(list, fileAddedToken{ID: int32(id), Content: token.Content, Special: token.Special})
	}
	return list, nil
}

// maxRankedBytes bounds the bytes of a token that has to be made from others: finding its parts takes a time that grows with the square.
const maxRankedBytes = 512

// rank writes the merges that follow from the vocabulary of a ranked model: all pairs of tokens whose concatenation is a token.
func (m *fileModel) rank() error {
	for _, joined := range slices.SortedFunc(maps.Keys(m.Vocab), func(a, b string) int { return cmp.Compare(m.Vocab[a], m.Vocab[b]) }) {
		if len(joined) > 2*maxRankedBytes { // a byte is written in at most two
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
