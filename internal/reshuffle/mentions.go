package reshuffle

import (
	"bytes"
	"context"
	"encoding/json"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/solver/modelconfig"
)

// jsonString matches the string literals of a JSON text: outside of them there are no quotes.
var jsonString = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// mentions rewrites what the configuration files of a checkpoint say of experts.
type mentions struct {
	c *checkpoint.Checkpoint
	m *mapping
	// checked are the entries that need no change, and experts what they were compared with; nil until one was.
	checked map[string]bool
	experts *expertNames
}

func newMentions(c *checkpoint.Checkpoint, m *mapping) *mentions {
	return &mentions{c: c, m: m, checked: map[string]bool{}}
}

// rename rewrites the names of experts in a configuration file, such as the ignore lists of quantisation, and leaves every
// other byte as it is. It refuses a text that tells experts apart in a way that it cannot rewrite.
func (n *mentions) rename(ctx context.Context, text []byte) ([]byte, error) {
	strict := modelconfig.Strict(text)
	if !json.Valid(strict) {
		return nil, checkpoint.Invalidf("not valid JSON")
	}
	if len(n.m.toNew) == 0 {
		return text, nil
	}
	if err := n.m.config.CheckEntries(strict); err != nil {
		return nil, err
	}
	var failed error
	alike, place := neutralPlaces(strict, n.m.config.Experts), -1
	out := jsonString.ReplaceAllFunc(text, func(literal []byte) []byte {
		place++
		var mention string
		if err := json.Unmarshal(literal, &mention); err != nil || failed != nil {
			return literal
		}
		part := n.m.config.Classify(mention)
		switch {
		case part.Role == checkpoint.Expert && n.m.toNew[part.Layer] == nil:
			return literal
		case part.Role == checkpoint.Expert:
			if failed = checkWhole(part, mention, n.m.config.Experts); failed != nil {
				return literal
			}
			return quote(n.m.newName(mention))
		case part.Role == checkpoint.Gate || part.Role == checkpoint.Shared || n.checked[mention] || alike[place]:
		case part.Role == checkpoint.Unrecognised && n.m.toNew[part.Layer] != nil && strings.ContainsAny(part.Name, "0123456789"):
			failed = checkpoint.Invalidf("%.200q is not known to be independent of the order of the experts, and cannot be rewritten", mention)
		case mayTellExpertsApart(mention):
			n.checked[mention] = true
			failed = n.checkNeutral(ctx, mention)
		}
		return literal
	})
	return out, failed
}

// expertOfAny matches the path of an expert, or of a module in it, whatever the layer: all that may stand before and behind the number.
var expertOfAny = regexp.MustCompile(`^([\w.]*\bexperts\.)(0|[1-9]\d*)((?:\.[A-Za-z_]\w*)*)$`)

// neutralPlaces finds the strings of a text that need no check, by their places among all its strings. The text is valid JSON.
//
// Entries of an array that differ only in the expert's number and name every expert, such as "mlp.experts.0.up_proj" to
// "mlp.experts.59.up_proj", mean the same in any order of the experts, however an engine reads them. Members such as _name_or_path are not
// about experts.
func neutralPlaces(text []byte, experts int) map[int]bool {
	neutral, place := map[int]bool{}, -1
	var open []container // the containers around
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		token, err := decoder.Token()
		if err != nil {
			return neutral // the end
		}
		inner := len(open) - 1
		switch token := token.(type) {
		case json.Delim:
			switch token {
			case '[', '{':
				next := container{neutral: inner >= 0 && open[inner].neutral || inner >= 0 && open[inner].value && modelconfig.NeutralMember(open[inner].key)}
				if token == '[' {
					next.names = likeNames{}
				}
				open = append(open, next)
				continue
			}
			open[inner].names.addWhole(experts, neutral)
			open = open[:inner]
		case string:
			place++
			if inner < 0 {
				continue
			}
			around := &open[inner]
			if around.names != nil {
				around.names.add(token, place, experts)
			}
			if around.neutral || around.value && modelconfig.NeutralMember(around.key) {
				neutral[place] = true
			}
			if around.names == nil && !around.value {
				around.key, around.value = token, true
				continue
			}
		}
		if n := len(open) - 1; n >= 0 {
			open[n].value = false
		}
	}
}

// container is an array or an object that a reader of JSON is in.
type container struct {
	// names are the entries of an array, nil for an object.
	names likeNames
	// key is the member of an object that is being read, value reports that its value is next.
	key   string
	value bool
	// neutral reports that nothing in it is about experts.
	neutral bool
}

// likeNames holds the places of an array's entries, by what is before and behind the expert's number, then by that number.
type likeNames map[[2]string]map[int][]int

func (l likeNames) add(entry string, place, experts int) {
	parts := expertOfAny.FindStringSubmatch(entry)
	if parts == nil {
		return
	}
	expert, err := strconv.Atoi(parts[2])
	if err != nil || expert >= experts {
		return
	}
	around := [2]string{parts[1], parts[3]}
	if l[around] == nil {
		l[around] = map[int][]int{}
	}
	l[around][expert] = append(l[around][expert], place)
}

// addWhole adds the places of the entries that name every expert.
func (l likeNames) addWhole(experts int, places map[int]bool) {
	for _, named := range l {
		if len(named) < experts {
			continue
		}
		for _, list := range named {
			for _, place := range list {
				places[place] = true
			}
		}
	}
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
	return strings.Contains(mention, "expert") || modelconfig.NamesExpert(mention) || strings.ContainsAny(mention, "0123456789") && strings.ContainsAny(mention, `\*[]()?+^$|`) || strings.Contains(mention, `\d`)
}

// checkNeutral requires that an entry, however an engine reads it, matches the new name of every expert's tensor or
// module if and only if it matches the old one: then it needs no change. An entry that has an expert's number and matches no name is
// refused.
func (n *mentions) checkNeutral(ctx context.Context, mention string) error {
	if n.experts == nil {
		n.experts = newExpertNames(n.c, n.m)
	}
	numbered := modelconfig.NamesExpert(mention)
	if !numbered && n.experts.lackAny(requiredWords(mention)) {
		return nil
	}
	matches, err := readings(mention)
	if err != nil {
		return err
	}
	matched, known := make([]bool, len(n.experts.all)), false
	for _, match := range matches {
		if err := ctx.Err(); err != nil {
			return err
		}
		for i, name := range n.experts.all {
			matched[i] = match(name)
			known = known || matched[i]
		}
		for _, move := range n.experts.moves {
			if matched[move.from] != matched[move.to] {
				return checkpoint.Invalidf("%q tells %s from %s, which change places, and cannot be rewritten: list full module names instead", mention, n.experts.all[move.from], n.experts.all[move.to])
			}
		}
	}
	if numbered && !known && !n.noExpert(mention) && !n.matchesUnmoved(matches) {
		return checkpoint.Invalidf("%.200q names an expert in a form that is not known, and cannot be rewritten", mention)
	}
	return nil
}

// noExpert reports whether an entry has the form of an expert's name, and a number that no expert has.
func (n *mentions) noExpert(mention string) bool {
	parts := expertOfAny.FindStringSubmatch(mention)
	if parts == nil {
		return false
	}
	expert, err := strconv.Atoi(parts[2])
	return err != nil || expert >= n.m.config.Experts
}

// matchesUnmoved reports whether an entry matches an expert, or a module in one, of a layer that stays as it is.
func (n *mentions) matchesUnmoved(matches []func(string) bool) bool {
	for _, shard := range n.c.Shards {
		for name := range shard.Tensors {
			part := n.m.config.Classify(name)
			if part.Role != checkpoint.Expert || n.m.toNew[part.Layer] != nil {
				continue
			}
			for modules := strings.Count(part.Name, ".") + 1; modules >= 0; modules-- {
				if slices.ContainsFunc(matches, func(match func(string) bool) bool { return match(name) }) {
					return true
				}
				name = parent(name)
			}
		}
	}
	return false
}

// expertNames are the names that the tensors and modules of experts have in the layers that change.
type expertNames struct {
	all []string
	// moves says, by places in all, which name becomes which.
	moves []struct{ from, to int }
	// first are the tensors' names with expert 0 in place of any other: what has no digits is in a name if and only if it is in such a one.
	first map[string]bool
}

func newExpertNames(c *checkpoint.Checkpoint, m *mapping) *expertNames {
	names := &expertNames{first: map[string]bool{}}
	places := map[string]int{}
	place := func(name string) int {
		at, known := places[name]
		if !known {
			at = len(names.all)
			places[name], names.all = at, append(names.all, name)
		}
		return at
	}
	told := map[string]bool{}
	for _, shard := range c.Shards {
		for old := range shard.Tensors {
			part := m.config.Classify(old)
			if part.Role != checkpoint.Expert || m.toNew[part.Layer] == nil {
				continue
			}
			names.first[part.ExpertName(0)] = true
			// The tensor, its module, and so on up to the expert itself; tensors of a module share the latter.
			new := m.newName(old)
			for modules := strings.Count(part.Name, ".") + 1; modules >= 0 && !told[old]; modules-- {
				told[old] = true
				names.moves = append(names.moves, struct{ from, to int }{place(old), place(new)})
				old, new = parent(old), parent(new)
			}
		}
	}
	return names
}

// lackAny tells that one of the words, which have no digits, is in no name.
func (n *expertNames) lackAny(words []string) bool {
	return slices.ContainsFunc(words, func(word string) bool {
		for name := range n.first {
			if strings.Contains(name, word) {
				return false
			}
		}
		return true
	})
}

var word = regexp.MustCompile(`[A-Za-z_]+`)

// requiredWords are words that a name must have to match an entry, whatever way the entry is read. They let most entries, which are about
// other modules, be told without looking at every expert.
func requiredWords(mention string) []string {
	pattern, _ := cutMarks(mention)
	if strings.Contains(pattern, "|") {
		return nil
	}
	if special := strings.IndexAny(pattern, `\[](){}^$`); special >= 0 {
		pattern = pattern[:special]
	}
	var words []string
	for _, piece := range strings.FieldsFunc(pattern, func(c rune) bool { return strings.ContainsRune("*?+", c) }) {
		// What follows may make the last letter optional.
		words = append(words, word.FindAllString(piece[:len(piece)-1], -1)...)
	}
	return words
}

func parent(name string) string { return name[:max(strings.LastIndexByte(name, '.'), 0)] }

// readings are the ways in which engines read an entry: as a part or the end of a name, as a shell pattern, and as a
// regular expression, with the marks that some formats put in front of one.
func readings(mention string) ([]func(string) bool, error) {
	out := []func(string) bool{
		func(name string) bool { return strings.Contains(name, mention) },
		func(name string) bool { return strings.HasSuffix(name, mention) },
	}
	pattern, marked := cutMarks(mention)
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

// cutMarks removes the marks that some formats put in front of a regular expression.
func cutMarks(mention string) (pattern string, marked bool) {
	pattern = mention
	for _, mark := range []string{"re:", "-:", "+:"} {
		if rest, ok := strings.CutPrefix(pattern, mark); ok {
			pattern, marked = rest, true
		}
	}
	return pattern, marked
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
