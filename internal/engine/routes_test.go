// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
)

// TestRoutesAreOfAPIs checks that each route of an engine is one of the APIs with a release and a source, that each API
// is a route of an engine, and that no route is pinned in a way that the router cannot check.
func TestRoutesAreOfAPIs(t *testing.T) {
	served := map[string]bool{}
	for _, a := range registry.All() {
		for _, r := range a.Routes {
			api := engine.APIOf(r.Path)
			served[r.Path] = true
			switch {
			case api.Path == "" || !r.First.Known() || r.Source == "":
				t.Errorf("%s: %+v is no API, or has no release or source", a.Type, r)
			case r.Pin != engine.ByLoad && (api.Smallest == "" || !a.CanPinRank()):
				t.Errorf("%s: %s is pinned, and the router cannot check whether the engine obeys", a.Type, r.Path)
			}
			header, field := a.OnRoute(r.Path)
			pinned := slices.ContainsFunc(a.Routes, func(o engine.Route) bool { return o.Path == r.Path && o.Pin != engine.ByLoad })
			if pinned != (header != "" || field != "") {
				t.Errorf("%s: %s is pinned %t, and the router uses the header %q and the member %q", a.Type, r.Path, pinned, header, field)
			}
		}
	}
	for _, api := range engine.APIs() {
		if !served[api.Path] || !api.Computes && api.Form != engine.NoPrompt || (api.Form == engine.Blocks) != (len(api.Prompt) == 2 && api.Form == engine.Blocks) {
			t.Errorf("%+v is a route of no engine, or contradicts itself", api)
		}
		if err := registry.CheckPassThrough(api.Path); err != nil {
			t.Errorf("%s is served and administrative: %v", api.Path, err)
		}
	}
}

func TestCheckPassThrough(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/custom": "", "/my_plugin/run-2": "", "/v1/completions": "", "/v1/responses": "",
		"": "absolute path", "/": "absolute path", "v1/custom": "absolute path", "/v1/custom/": "absolute path", "/v1//custom": "absolute path", "/v1/../flush_cache": "absolute path",
		"/v1/./x": "absolute path", "/v1/{id}": "absolute path", "/v1/%66lush_cache": "absolute path", "/a b": "absolute path", "/a?b": "absolute path", "/a\n": "absolute path",
		"/" + strings.Repeat("a", 128): "absolute path",
		"/flush_cache":                 "administrative", "/FLUSH_CACHE": "administrative", "/flush_cache/x": "administrative", "/hicache/storage-backend": "administrative",
		"/v1/load_lora_adapter": "administrative", "/collective_rpc": "administrative", "/update_weights": "administrative", "/metrics": "administrative", "/prometheus/metrics": "administrative",
		"/inference/v1/abort_requests": "administrative", "/open_session": "administrative", "/flush_cached": "",
	} {
		err := registry.CheckPassThrough(path)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", path, err, want)
		}
	}
}
