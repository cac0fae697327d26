// SPDX-License-Identifier: Apache-2.0

package model

// Cache contains the keys and values of one sequence for all layers.
type Cache struct {
	length, capacity int
	layers           []layerCache
}

// layerCache stores keys in panels of positions, [capacity/lanes][KVHeads*HeadDim][lanes], and values by position,
// [capacity][KVHeads*HeadDim]. Each is the operand of one of the two products of attention.
type layerCache struct{ keys, values []float32 }

// NewCache returns an empty cache for a sequence of at most capacity tokens.
func (m *Model) NewCache(capacity int) *Cache {
	width := m.KVHeads * m.HeadDim
	c := &Cache{capacity: capacity, layers: make([]layerCache, m.Layers)}
	for l := range c.layers {
		c.layers[l] = layerCache{
			keys:   make([]float32, ceilDiv(capacity, lanes)*lanes*width),
			values: make([]float32, capacity*width+lanes), // the last panel may read past a head that is not a multiple of lanes
		}
	}
	return c
}

// Len returns the number of tokens in the cache.
func (c *Cache) Len() int { return c.length }
