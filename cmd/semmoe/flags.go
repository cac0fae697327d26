package main

import (
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// numbersVar defines a flag of comma-separated numbers. Its help shows the default in command-line syntax, or no
// default if there is none. The usage contains the name of the value in backquotes.
func numbersVar(f *pflag.FlagSet, to *[]float64, name string, value []float64, usage string) {
	f.Float64SliceVar(to, name, value, usage)
	texts := make([]string, len(value))
	for i, v := range value {
		texts[i] = strconv.FormatFloat(v, 'g', -1, 64)
	}
	f.Lookup(name).DefValue = strings.Join(texts, ",")
}
