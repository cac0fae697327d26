// SPDX-License-Identifier: Apache-2.0

package main

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

//go:embed flags
var flagLists embed.FS

// option is a flag of a release.
type option struct {
	names []string
	// count is the number of values in argparse notation: 0, 1, ?, *, + or a number.
	count string
	// kind is the type of a value (int or float), or the allowed values separated by |; empty for any text.
	kind string
}

// commandLine describes the command-line parser of an engine.
type commandLine struct {
	options map[string]*option
	// click is true if the engine uses click, which accepts no abbreviations. argparse accepts a unique prefix of a
	// flag.
	click bool
	// flexible is true if _ and - are equivalent in names, and --flag.member sets a member of a JSON object, as in
	// vLLM.
	flexible bool
}

// readCommandLine reads the flag list of a release.
func readCommandLine(list string, click, flexible bool) (*commandLine, error) {
	text, err := flagLists.ReadFile("flags/" + list + ".txt")
	if err != nil {
		return nil, err
	}
	c := &commandLine{options: map[string]*option{}, click: click, flexible: flexible}
	for line := range strings.Lines(string(text)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(fields) != 3 {
			return nil, fmt.Errorf("%s: %q has %d fields, want 3", list, line, len(fields))
		}
		o := &option{strings.Fields(fields[0]), fields[1], fields[2]}
		for _, name := range o.names {
			c.options[name] = o
		}
	}
	return c, nil
}

// arguments holds the values of the flags on a command line, and the positional arguments. The value of a switch is its
// spelling.
type arguments struct {
	options map[string]*option
	values  map[*option][]string
	// members holds the members of JSON objects that --flag.member sets.
	members map[*option]map[string]string
	rest    []string
}

// parse parses arguments, and rejects them with the same errors as the engine.
func (c *commandLine) parse(args []string) (*arguments, error) {
	a := &arguments{options: c.options, values: map[*option][]string{}, members: map[*option]map[string]string{}}
	var unknown []string
	for i := 0; i < len(args); i++ {
		if !isOption(args[i]) {
			a.rest = append(a.rest, args[i])
			continue
		}
		name, value, joined := strings.Cut(args[i], "=")
		member := ""
		if c.flexible && strings.HasPrefix(name, "--") {
			name, member, _ = strings.Cut(name, ".")
			name = strings.ReplaceAll(name, "_", "-")
		}
		o, err := c.find(name)
		if err != nil {
			return nil, err
		}
		if o == nil {
			unknown = append(unknown, args[i])
			continue
		}
		var values []string
		if joined {
			values = []string{value}
		}
		for o.takes(len(values)) && !joined && i+1 < len(args) && (c.click || !isOption(args[i+1])) {
			i++
			values = append(values, args[i])
		}
		if err := o.check(values, joined); err != nil {
			return nil, fmt.Errorf("argument %s: %w", strings.Join(o.names, "/"), err)
		}
		if o.count == "0" {
			values = []string{name}
		}
		if member == "" {
			a.values[o] = values
			continue
		}
		if a.members[o] == nil {
			a.members[o] = map[string]string{}
		}
		a.members[o][member] = values[0]
	}
	if len(unknown) > 0 {
		if c.click {
			return nil, fmt.Errorf("no such option: %s", unknown[0])
		}
		return nil, fmt.Errorf("unrecognized arguments: %s", strings.Join(unknown, " "))
	}
	return a, nil
}

// isOption reports whether argparse takes an argument for a flag: negative numbers and texts with a space are values.
func isOption(arg string) bool {
	if len(arg) < 2 || arg[0] != '-' || strings.Contains(arg, " ") {
		return false
	}
	_, err := strconv.ParseFloat(arg, 64)
	return err != nil
}

// find returns the flag with a name or with an unambiguous prefix of a name; nil if there is none.
func (c *commandLine) find(name string) (*option, error) {
	if o := c.options[name]; o != nil || c.click || !strings.HasPrefix(name, "--") {
		return o, nil
	}
	var found *option
	for _, full := range slices.Sorted(maps.Keys(c.options)) {
		switch o := c.options[full]; {
		case !strings.HasPrefix(full, name) || o == found:
		case found != nil:
			return nil, fmt.Errorf("ambiguous option: %s could match %s, %s", name, found.names[0], full)
		default:
			found = o
		}
	}
	return found, nil
}

// takes reports whether the flag accepts another value after the given number of values.
func (o *option) takes(values int) bool {
	switch o.count {
	case "*", "+":
		return true
	case "?":
		return values < 1
	}
	n, _ := strconv.Atoi(o.count)
	return values < n
}

func (o *option) check(values []string, joined bool) error {
	n, err := strconv.Atoi(o.count)
	switch {
	case o.count == "0" && joined:
		return fmt.Errorf("ignored explicit argument '%s'", values[0])
	case err == nil && len(values) != n:
		return fmt.Errorf("expected %d arguments", n)
	case o.count == "+" && len(values) == 0:
		return errors.New("expected at least one argument")
	}
	for _, value := range values {
		switch o.kind {
		case "":
		case "int":
			_, err = strconv.Atoi(value)
		case "float":
			_, err = strconv.ParseFloat(value, 64)
		default:
			if choices := strings.Split(o.kind, "|"); !slices.Contains(choices, value) {
				return fmt.Errorf("invalid choice: '%s' (choose from %s)", value, strings.Join(choices, ", "))
			}
		}
		if err != nil && (o.kind == "int" || o.kind == "float") {
			return fmt.Errorf("invalid %s value: '%s'", o.kind, value)
		}
	}
	return nil
}

// negates reports whether a name of a switch is one that disables it: --no-flag, and in vLLM from 0.33.0 --disable-x of
// --enable-x and the reverse (EnableDisableAction in vllm/utils/argparse_utils.py).
func (o *option) negates(name string) bool {
	first, _, _ := strings.Cut(strings.TrimPrefix(o.names[0], "--"), "-")
	inverse := map[string]string{"enable": "--disable-", "disable": "--enable-"}[first]
	return strings.HasPrefix(name, "--no-") || inverse != "" && strings.HasPrefix(name, inverse)
}

// given reports whether a flag is set. If both a name of a switch and its negation are given, the last one applies.
func (a *arguments) given(name string) bool {
	o := a.options[name]
	values, whole := a.values[o]
	if whole && o.count == "0" {
		return o.negates(values[0]) == o.negates(name)
	}
	return whole || a.members[o] != nil
}

// texts returns the values of a flag.
func (a *arguments) texts(name string) []string { return a.values[a.options[name]] }

// text returns the value of a flag, or a default.
func (a *arguments) text(name, fallback string) string {
	if values := a.texts(name); len(values) > 0 {
		return values[0]
	}
	return fallback
}

// number returns the value of a flag, or a default. parse has checked that the value is a number.
func (a *arguments) number(name string, fallback int) int {
	if n, err := strconv.Atoi(a.text(name, "")); err == nil {
		return n
	}
	return fallback
}

// object returns the JSON object of a flag, including the members that --flag.member sets as texts.
func (a *arguments) object(name string) (map[string]any, error) {
	object := map[string]any{}
	if text := a.text(name, ""); text != "" {
		if err := json.Unmarshal([]byte(text), &object); err != nil {
			return nil, fmt.Errorf("argument %s: Value %s cannot be converted: %w", name, text, err)
		}
	}
	for member, value := range a.members[a.options[name]] {
		object[member] = value
	}
	return object, nil
}
