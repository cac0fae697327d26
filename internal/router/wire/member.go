// SPDX-License-Identifier: Apache-2.0

package wire

import "github.com/semmoe/operator/internal/router/jsonscan"

// Text returns a member that is a string of at most max bytes of JSON; empty otherwise.
func (b Body) Text(name string, max int) string {
	value := b.get(name)
	if len(value) > max {
		return ""
	}
	text, _ := jsonscan.String(value)
	return text
}

// True reports whether a member is true.
func (b Body) True(name string) bool { return string(b.get(name)) == "true" }
