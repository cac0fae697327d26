// SPDX-License-Identifier: Apache-2.0

// Package registry maps the values of spec.engine.type to adapters.
package registry

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/sglang"
	"github.com/semmoe/operator/internal/engine/trtllm"
	"github.com/semmoe/operator/internal/engine/vllm"
	"github.com/semmoe/operator/internal/engine/vllmascend"
)

// adapters are made once: they contain sorted tables of routes and mechanisms, and decisions look them up often.
var adapters = sync.OnceValue(func() []engine.Adapter {
	return []engine.Adapter{sglang.Adapter(), vllm.Adapter(), vllmascend.Adapter(), trtllm.Adapter()}
})

// All returns the adapters of all engines. Callers share their slices, and must not change them.
func All() []engine.Adapter { return slices.Clone(adapters()) }

// Types returns the engine types as a comma-separated list, for messages.
func Types() string {
	var types []string
	for _, adapter := range All() {
		types = append(types, adapter.Type)
	}
	return strings.Join(types, ", ")
}

// Names returns the distinct non-empty names that a function returns for the engines.
func Names(of func(engine.Adapter) string) []string {
	var names []string
	for _, adapter := range All() {
		if name := of(adapter); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// CheckPassThrough returns an error if clients must not reach a path through the request router, whatever engine serves.
func CheckPassThrough(path string) error {
	var administrative []string
	for _, adapter := range All() {
		administrative = append(administrative, adapter.Administrative...)
	}
	return engine.CheckPassThrough(path, administrative)
}

// For returns the adapter of an engine type. Callers share its slices, and must not change them.
func For(engineType string) (engine.Adapter, error) {
	for _, adapter := range adapters() {
		if adapter.Type == engineType {
			return adapter, nil
		}
	}
	return engine.Adapter{}, fmt.Errorf("engine type %q is invalid: allowed are %s", engineType, Types())
}
