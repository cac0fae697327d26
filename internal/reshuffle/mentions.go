package reshuffle

import (
	"bytes"
	"encoding/json"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/solver/modelconfig"
)

// jsonString matches the string literals of a JSON text: outside of them there are no quotes.
var jsonString = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// renameMentions rewrites the names of experts in a configuration file, such as the ignore lists of quantisation, and
// leaves every other byte as it is. It refuses a text that tells experts apart in a way that it cannot rewrite.
func renameMentions(c *checkpoint.Checkpoint, m *mapping, text []byte) ([]byte, error) {
	if !json.Valid(modelconfig.Strict(text)) {
		return nil, checkpoint.Invalidf("not valid JSON")
	}
	var failed error
	checked := map[string]bool{}
	out := jsonString.ReplaceAllFunc(text, func(literal []byte) []byte {
		var mention string
		if err := json.Unmarshal(literal, &mention); err != nil || failed != nil {
			return literal
		}
		part := m.config.Classify(mention)
		switch {
		case part.Role == checkpoint.Expert && m.toNew[part.Layer] == nil:
			return literal
		case part.Role == checkpoint.Expert:
			if failed = checkWhole(part, mention, m.config.Experts); failed != nil {
				return literal
			}
			return quote(m.newName(mention))
		case part.Role == checkpoint.Gate || part.Role == checkpoint.Shared || checked[mention]:
		case mayTellExpertsApart(mention):
			checked[mention] = true
			failed = checkNeutral(c, m, mention)
		}
		return literal
	})
	return out, failed
}

// checkWhole refuses a name that ends in the number of an expert where that is the beginning of another expert's:
// engines disagree whether such an entry stands for one expert or, as a prefix, for several.
func checkWhole(part checkpoint.Part, mention string, experts int) error {
	if part.Name == "" && part.Expert > 0 && part.Expert*10 < experts {
		return checkpoint.Invalidf("%q may stand for expert %d alone or also for expert %d: write it with the module's name", mention, part.Expert, part.Expert*10)
	}
	return nil
}

// mayTellExpertsApart is a cheap test for what may be a pattern or a part of a name.
func mayTellExpertsApart(mention string) bool {
	return strings.Contains(mention, "expert") || strings.ContainsAny(mention, "0123456789") && strings.ContainsAny(mention, `\*[]()?+^$|`) || strings.Contains(mention, `\d`)
}

// checkNeutral requires that an entry, however an engine reads it, matches the new name of every expert's tensor or
// module if and only if it matches the old one: then it needs no change.
func checkNeutral(c *checkpoint.Checkpoint, m *mapping, mention string) error {
	matches, err := readings(mention)
	if err != nil {
		return err
	}
	for _, shard := range c.Shards {
		for old := range shard.Tensors {
			part := m.config.Classify(old)
			if part.Role != checkpoint.Expert || m.toNew[part.Layer] == nil {
				continue
			}
			new := m.newName(old)
			// The tensor, its module, and so on up to the expert itself.
			for modules := strings.Count(part.Name, ".") + 1; modules >= 0; modules-- {
				for _, match := range matches {
					if match(old) != match(new) {
						return checkpoint.Invalidf("%q tells %s from %s, which change places, and cannot be rewritten: list full module names instead", mention, old, new)
					}
				}
				old, new = parent(old), parent(new)
			}
		}
	}
	return nil
}

func parent(name string) string { return name[:max(strings.LastIndexByte(name, '.'), 0)] }

// readings are the ways in which engines read an entry: as a part or the end of a name, as a shell pattern, and as a
// regular expression, with the marks that some formats put in front of one.
func readings(mention string) ([]func(string) bool, error) {
	out := []func(string) bool{
		func(name string) bool { return strings.Contains(name, mention) },
		func(name string) bool { return strings.HasSuffix(name, mention) },
	}
	pattern, marked := mention, false
	for _, mark := range []string{"re:", "-:", "+:"} {
		if rest, ok := strings.CutPrefix(pattern, mark); ok {
			pattern, marked = rest, true
		}
	}
	if !strings.ContainsAny(pattern, `\*[]()?+^$|.`) {
		return out, nil
	}
	out = append(out, func(name string) bool { matched, err := path.Match(pattern, name); return err == nil && matched })
	for _, form := range []string{"%s", "^(?:%s)", "^(?:%s)$"} {
		expression, err := regexp.Compile(strings.Replace(form, "%s", pattern, 1))
		if err == nil {
			out = append(out, expression.MatchString)
		} else if marked || strings.Contains(pattern, "(?") {
			return nil, checkpoint.Invalidf("%q: cannot tell which experts it matches: %v", mention, err)
		}
	}
	return out, nil
}

// quote writes a JSON string.
func quote(text string) []byte {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(text); err != nil {
		return []byte(strconv.Quote(text))
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n"))
}
