package modelconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// CheckExpertEntries refuses a JSON configuration that may name experts by number, in a place where an order of the experts would have to be
// known to rewrite it: maps keyed by numbers, lists as long as the experts, lists of numbers that may be those of experts, and numbers
// under names that speak of experts. Names of modules and patterns are not its subject. The error names the entry.
func CheckExpertEntries(text []byte, experts, layers int) error {
	r := entryReader{experts: experts, layers: layers, decoder: json.NewDecoder(bytes.NewReader(Strict(text)))}
	r.decoder.UseNumber()
	if _, err := r.value(nil); err != nil {
		return err
	}
	if _, err := r.decoder.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("not valid JSON: text after the value")
	}
	return nil
}

// maxEntryDepth bounds the nesting of a configuration.
const maxEntryDepth = 64

// entryReader reads the tokens of a configuration, so that a large one needs no memory.
type entryReader struct {
	experts, layers int
	decoder         *json.Decoder
}

// entry is what the container of a value has to know of it.
type entry struct {
	// number reports a number, id a number that may be that of an expert, and module the name of a module or a pattern of names.
	number, id, module bool
}

// value reads a value with the names of the members that lead to it. A neutral one is only read over.
func (r *entryReader) value(path []string) (entry, error) {
	token, err := r.decoder.Token()
	if err != nil {
		return entry{}, fmt.Errorf("not valid JSON: %v", err)
	}
	if len(path) > maxEntryDepth {
		return entry{}, fmt.Errorf("%s: nested deeper than %d levels", strings.Join(path[:4], "."), maxEntryDepth)
	}
	switch token := token.(type) {
	case json.Delim:
		if token == '[' {
			return entry{}, r.array(path)
		}
		return entry{}, r.object(path)
	case json.Number:
		n, err := token.Int64()
		return entry{number: true, id: err == nil && n >= 0 && n < int64(r.experts)}, nil
	case string:
		if numbers.MatchString(token) && !neutral(path) && SpeaksOfExperts(strings.Join(path, ".")) {
			return entry{}, r.refuse(path, "%.100q may be a list of experts", token)
		}
		return entry{module: isModule(token)}, nil
	}
	return entry{}, nil
}

// numbers matches a text that is a list of numbers.
var numbers = regexp.MustCompile(`^[\s,;:|()\[\]-]*\d[\d\s,;:|()\[\]-]*$`)

func (r *entryReader) object(path []string) error {
	stems, keys := map[string]int{}, 0
	for r.decoder.More() {
		token, err := r.decoder.Token()
		if err != nil {
			return fmt.Errorf("not valid JSON: %v", err)
		}
		key := token.(string) // a key is a string
		inner := append(slices.Clip(path), key)
		value, err := r.value(inner)
		if err != nil {
			return err
		}
		keys++
		switch _, err := strconv.ParseUint(key, 10, 64); {
		case neutral(path):
		case err == nil && !isKeyedByLayer(path):
			return r.refuse(path, "its member %q may be the number of an expert", key)
		case value.id && SpeaksOfExperts(strings.Join(inner, ".")) && !neutral(inner) && !isCount(key):
			return r.refuse(inner, "it may be the number of an expert")
		case err != nil:
			if stem := digits.ReplaceAllString(key, "#"); stem != key {
				stems[stem]++
			}
		}
	}
	for stem, count := range stems {
		if experts := r.experts; count >= experts && experts > 1 && !isModule(stem) && count != r.layers {
			return r.refuse(path, "it has a member %q for each expert", stem)
		}
	}
	_, err := r.decoder.Token()
	return jsonError(err)
}

var digits = regexp.MustCompile(`\d+`)

// isModule reports whether a key is the name of a module or a tensor, or a pattern of such names.
func isModule(key string) bool { return strings.ContainsAny(key, `.*\`) }

func (r *entryReader) array(path []string) error {
	length, numbersOnly, ids, modules := 0, true, true, true
	for r.decoder.More() {
		item, err := r.value(append(slices.Clip(path), "[]"))
		if err != nil {
			return err
		}
		length++
		numbersOnly, ids, modules = numbersOnly && item.number, ids && item.id, modules && item.module
	}
	if _, err := r.decoder.Token(); err != nil {
		return jsonError(err)
	}
	experts := r.experts
	switch {
	case neutral(path) || length == 0 || experts < 2:
	case length%experts == 0 && (numbersOnly || length == experts && !modules && !isModuleList(path)) && !r.isPerLayer(path, length):
		return r.refuse(path, "it has %d entries, and a layer %d experts", length, experts)
	case ids && !hasWord(path, plainWords):
		return r.refuse(path, "its numbers may be those of experts")
	}
	return nil
}

func jsonError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("not valid JSON: %v", err)
}

// refuse is the error of an entry.
func (r *entryReader) refuse(path []string, format string, args ...any) error {
	name := strings.ReplaceAll(strings.Join(path, "."), ".[]", "[]")
	if name == "" {
		name = "the configuration"
	}
	return fmt.Errorf("%.200s: its dependence on the order of the experts is unknown: "+format, append([]any{name}, args...)...)
}

var (
	// neutralMembers are members of configurations that do not name experts, whatever is in them.
	neutralMembers = []string{
		"vision_config", "audio_config", "rope_scaling", "rope_parameters", "id2label", "label2id", "architectures", "auto_map", "eos_token_id", "bos_token_id",
		"pad_token_id", "mlp_only_layers", "moe_layer_freq", "layer_types", "moe_layers_enum", "added_tokens_decoder", "_name_or_path", "name_or_path",
		"base_model_name_or_path", "model_type", "transformers_version", "torch_dtype", "dtype", "weight_block_size", "version", "mrope_section", "bad_words_ids", "forced_decoder_ids",
	}
	// plainWords are words in the names of members whose numbers are not those of experts, unless the name speaks of experts.
	plainWords = []string{
		"layer", "token", "size", "shape", "dim", "head", "block", "window", "bits", "rope", "label", "lang", "image", "vision", "video", "audio", "pixel",
		"mean", "std", "stride", "kernel", "version", "visual", "section", "total",
	}
	// countWords are parts of the names of members that count or size something.
	countWords = []string{
		"num", "n", "count", "size", "dim", "topk", "k", "per", "layer", "layers", "interval", "step", "freq", "frequency", "group", "groups", "parallel", "capacity",
		"width", "coef", "coeff", "factor", "bits", "rank", "eps", "alpha", "version", "loss", "limit", "degree", "noise", "dropout", "rate", "prob", "weight",
		"scale", "scaling", "ratio", "temperature", "logits", "init", "std", "seed", "length", "max", "min",
	}
)

// neutral reports whether a value is below a member that does not name experts.
func neutral(path []string) bool { return slices.ContainsFunc(path, NeutralMember) }

// NeutralMember reports whether nothing below a member of a configuration names an expert.
func NeutralMember(name string) bool {
	return slices.Contains(neutralMembers, name) || strings.HasSuffix(name, "_token_ids")
}

// isCount reports whether a member counts experts rather than names one.
func isCount(member string) bool {
	parts := strings.Split(strings.ToLower(member), "_")
	return slices.ContainsFunc(parts, func(part string) bool { return slices.Contains(countWords, part) })
}

// hasWord reports whether the name of the innermost member has one of the words, and no member speaks of experts.
func hasWord(path, words []string) bool {
	name := strings.ToLower(memberName(path))
	return !SpeaksOfExperts(strings.Join(path, ".")) && slices.ContainsFunc(words, func(word string) bool { return strings.Contains(name, word) })
}

// memberName is the innermost name of a path that is not an array's entry.
func memberName(path []string) string {
	for _, member := range slices.Backward(path) {
		if member != "[]" {
			return member
		}
	}
	return ""
}

// isKeyedByLayer reports whether a map's numbers are those of layers. A second level of numbers would be those of experts.
func isKeyedByLayer(path []string) bool { return hasWord(path, []string{"layer"}) }

// isPerLayer reports whether a list has an entry for each layer.
func (r *entryReader) isPerLayer(path []string, length int) bool {
	return length == r.layers && hasWord(path, []string{"layer"})
}

// isModuleList reports whether a list has names of modules, or patterns of names, which are compared with the names of experts.
func isModuleList(path []string) bool {
	return slices.ContainsFunc(path, func(member string) bool {
		return slices.ContainsFunc([]string{"ignore", "exclude", "modules", "targets", "not_convert"}, func(word string) bool {
			return strings.Contains(strings.ToLower(member), word)
		})
	})
}

var (
	// expertWord matches words that relate a name to the routed experts.
	expertWord = regexp.MustCompile(`(?i)expert|rout(?:er|ed|ing)|moe|eplb|e_score`)
	// sharedExpert matches the names of shared experts, which no gate chooses.
	sharedExpert = regexp.MustCompile(`(?i)shared[_-]?experts?`)
	// numberedExpert matches a text that names an expert by its number.
	numberedExpert = regexp.MustCompile(`(?i)experts?\W{0,3}_?\d|\d(?:st|nd|rd|th)?[ _-]?expert\b`)
)

// SpeaksOfExperts reports whether a name has a word that relates it to the routed experts.
func SpeaksOfExperts(name string) bool {
	return expertWord.MatchString(sharedExpert.ReplaceAllString(name, ""))
}

// NamesExpert reports whether a text names a routed expert by its number, in whatever form.
func NamesExpert(text string) bool {
	return numberedExpert.MatchString(sharedExpert.ReplaceAllString(text, ""))
}
