// SPDX-License-Identifier: Apache-2.0

// Package prompts contains the prompts that the probe sends to engines.
package prompts

import (
	_ "embed"
	"encoding/json"
	"slices"
)

// Set is the name of the prompts. It changes with every change of a prompt or of the way in which prompts are sent.
// Answers with another name were recorded by another version. They remain valid, because they contain their prompts.
const Set = "semmoe-prompts/2"

// All are the prompts that are sent to engines. They are of many kinds (prose in seven languages, program code,
// SQL, JSON, YAML), because different kinds activate different experts. docs/lossless-probe.md states how many tokens a given
// power needs.
var All = slices.Concat(beginnings, readPassages())

// beginnings are texts with an obvious continuation: the most likely token has a large margin.
var beginnings = []string{
	"func sum(values []int) int {\n\ttotal := 0\n\tfor _, value := range values {\n\t\ttotal +=",
	"def is_even(number):\n    \"\"\"Return True if the number is even.\"\"\"\n    return",
	"SELECT customers.name, COUNT(orders.id) FROM customers JOIN orders ON orders.customer_id =",
	"{\"name\": \"Ada\", \"age\": 36, \"languages\": [\"English\", \"French\"], \"address\": {\"street\":",
	"The sun rises in the east and sets in the",
	"Montag, Dienstag, Mittwoch, Donnerstag,",
	"Il était une fois, dans un petit village, une jeune fille qui",
	"一年有四个季节：春天、夏天、",
}

// passages holds beginnings of documents of test/corpus as a JSON list of strings.
//
//go:embed passages.json
var passages []byte

// readPassages panics on a file that is not a list of strings, which a test excludes.
func readPassages() (texts []string) {
	if err := json.Unmarshal(passages, &texts); err != nil {
		panic(err)
	}
	return texts
}
