// SPDX-License-Identifier: Apache-2.0

package terminal

import "strings"

// Node is an entry of a tree.
type Node struct {
	Text     Text
	Children []*Node
}

// Add appends a child and returns it.
func (n *Node) Add(text Text) *Node {
	child := &Node{Text: text}
	n.Children = append(n.Children, child)
	return child
}

// Tree draws a node and its descendants. Each node takes one line, or several in a narrow terminal.
func (s Style) Tree(root *Node) string {
	var out strings.Builder
	s.branch(&out, root, "", "")
	return out.String()
}

// hanging is the indentation of continuation lines in columns. It is larger than the indentation of children, so that
// both can be distinguished.
const hanging = 4

// branch writes a node with the line prefix, and its descendants with the line prefix below.
func (s Style) branch(out *strings.Builder, n *Node, prefix, below string) {
	trunk := below
	if len(n.Children) > 0 {
		trunk += "│"
	}
	trunk += strings.Repeat(" ", len([]rune(below))+hanging-len([]rune(trunk)))
	for i, line := range s.wrapped(n.Text, s.within(len([]rune(prefix))), s.within(len([]rune(trunk)))) {
		lead := prefix
		if i > 0 {
			lead = trunk
		}
		out.WriteString(s.paint(lead, Faint) + line + "\n")
	}
	for i, child := range n.Children {
		if i == len(n.Children)-1 {
			s.branch(out, child, below+"└─ ", below+"   ")
		} else {
			s.branch(out, child, below+"├─ ", below+"│  ")
		}
	}
}
