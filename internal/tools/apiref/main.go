// SPDX-License-Identifier: Apache-2.0

// Command apiref writes the API reference as one Markdown document. For each kind of the given
// CustomResourceDefinitions it contains a table of all fields with their types, limits, defaults and descriptions.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"

	"sigs.k8s.io/yaml"
)

const header = `# API reference

<!-- Generated from config/crd by make generate: change the comments of api/v1alpha1. -->

Every field of the three kinds of ` + "`semmoe.io/v1alpha1`" + `, as ` + "`kubectl explain`" + ` shows it. [Serving](serving.md),
[profiling](profiling.md) and [planning](planning.md) say what to do with them. A field in bold is required where its parent is given.
Fields of embedded Kubernetes types (volumes, pod templates and the like) are those of Kubernetes, and not listed.
`

func main() {
	out := flag.String("out", "", "path of the document to write")
	flag.Parse()
	if *out == "" || flag.NArg() == 0 {
		fail(fmt.Errorf("usage: apiref --out FILE CRD [CRD...]"))
	}
	var document strings.Builder
	document.WriteString(header)
	for _, file := range flag.Args() {
		text, err := os.ReadFile(file)
		if err != nil {
			fail(err)
		}
		var d definition
		if err := yaml.Unmarshal(text, &d); err != nil {
			fail(fmt.Errorf("%s: %w", file, err))
		}
		if err := write(&document, d); err != nil {
			fail(fmt.Errorf("%s: %w", file, err))
		}
	}
	if err := os.WriteFile(*out, []byte(document.String()), 0o644); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "apiref:", err)
	os.Exit(1)
}
