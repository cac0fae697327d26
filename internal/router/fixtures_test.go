// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/http"
	"slices"
	"testing"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/wire"
)

// planned is a plan for the small model on four ranks, with its layout.
type planned struct {
	planstest.Planned
	layout *plans.Layout
}

func layoutOf(p planstest.Planned) planned {
	return planned{p, plans.New(p.Artifact.Digest, p.Plan, p.Tokenizer)}
}

// solved returns two plans with different placements.
func solved(t testing.TB) (first, second planned) {
	t.Helper()
	a, b := planstest.Solved(t)
	return layoutOf(a), layoutOf(b)
}

// favouring returns a plan with new tables for the layout of another plan. The tables score one rank highest for every
// request.
func favouring(t *testing.T, p planned, rank int) planned {
	t.Helper()
	return layoutOf(p.Favouring(t, rank))
}

// allRoutes returns the routes for POST requests.
func allRoutes() (paths []string) {
	for _, api := range engine.APIs() {
		paths = append(paths, api.Path)
	}
	return paths
}

// inferenceRoutes returns the routes whose requests activate experts.
func inferenceRoutes() []string {
	return slices.DeleteFunc(allRoutes(), func(path string) bool { return !engine.APIOf(path).Computes })
}

// parsed returns a body of JSON text.
func parsed(text string) wire.Body { return wire.ParseBody([]byte(text)) }

// requestOf returns a request with a body.
func requestOf(path, id string, body []byte) *request {
	return newRequest(apiOf(http.MethodPost, path, nil), id, wire.ParseBody(body), true)
}
