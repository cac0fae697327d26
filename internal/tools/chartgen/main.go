// SPDX-License-Identifier: Apache-2.0

// Command chartgen keeps the Helm chart and config/ in sync. It copies the output of controller-gen from config/ to the
// chart, renders the other templates of the chart with default values to config/, and generates the table of values in
// the chart's README from values.yaml.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	helm := flag.String("helm", "", "path of helm")
	chart := flag.String("chart", "", "directory of the chart")
	config := flag.String("config", "", "directory of the kustomizations")
	flag.Parse()
	if *helm == "" || *chart == "" || *config == "" || flag.NArg() > 0 {
		fail(fmt.Errorf("usage: chartgen --helm FILE --chart DIRECTORY --config DIRECTORY"))
	}
	// The generated files must be in the chart before it is rendered.
	for _, step := range []func() error{
		func() error { return takeGenerated(*config, *chart) },
		func() error { return renderConfig(*helm, *chart, *config) },
		func() error { return documentValues(*chart) },
	} {
		if err := step(); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "chartgen:", err)
	os.Exit(1)
}

// takeGenerated copies the output of controller-gen to the files of the chart, and removes deleted
// CustomResourceDefinitions.
func takeGenerated(config, chart string) error {
	files := filepath.Join(chart, "files")
	if err := os.RemoveAll(filepath.Join(files, "crd")); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(files, "crd"), 0o755); err != nil {
		return err
	}
	crds, err := filepath.Glob(filepath.Join(config, "crd", "semmoe.io_*.yaml"))
	if err != nil {
		return err
	}
	copies := map[string]string{filepath.Join(config, "rbac", "role.yaml"): filepath.Join(files, "role.yaml")}
	for _, crd := range crds {
		copies[crd] = filepath.Join(files, "crd", filepath.Base(crd))
	}
	for from, to := range copies {
		text, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := os.WriteFile(to, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
