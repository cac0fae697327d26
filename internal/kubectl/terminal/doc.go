// Package terminal writes text for people: wrapped to the width of their terminal, coloured where that helps, and plain where nobody
// looks.
//
// Invariants:
//   - What is written is made of its arguments alone; Of is the only function that looks at the process's surroundings.
//   - Without a width no line is broken, so that what reads from a pipe finds one thing in one line. With one, no line is longer.
//   - Colour says nothing that the words do not say as well.
package terminal
