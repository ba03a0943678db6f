// The theme's search shows nothing where it finds nothing: say so
const watched = new WeakSet()
document.addEventListener('input', e => {
  const input = e.composedPath()[0], root = input.getRootNode()
  if (!root.host) return // another input: that of the search is in a shadow root
  if (!watched.has(root)) { // on a slow machine results come later than the note
    watched.add(root)
    new MutationObserver(() => root.querySelector('ol a') && root.querySelector('.nothing-found')?.remove())
      .observe(root, {childList: true, subtree: true})
  }
  setTimeout(() => { // when the results are there
    root.querySelector('.nothing-found')?.remove()
    if (!input.value.trim() || root.querySelector('ol a')) return
    const note = document.createElement('p')
    note.className = 'nothing-found'
    note.textContent = 'No page has all of these words. Try one of them, or a shorter one.'
    note.style.cssText = 'margin: 0; padding: 12px 18px; font-size: 14px; color: rgb(var(--color-foreground))'
    input.parentElement.parentElement.after(note)
  }, 500)
})
