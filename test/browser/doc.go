// SPDX-License-Identifier: Apache-2.0

// Package browser checks the report page and the documentation site in Chromium: at the widths of a desktop and of a
// phone, in light and dark colors, with the keyboard alone, and by the accessibility rules of axe-core. It is a
// separate module, because the operator does not need the library that controls the browser. Start at make browser.
package browser
